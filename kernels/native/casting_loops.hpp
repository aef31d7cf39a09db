// Changes of number format.
namespace gradwire::GRADWIRE_LEVEL {

template <bool STREAMS, class From, class To>
void cast_all(const From* source, To* out, float* residual, int64_t numel, float scale) {
    const auto scaled = [&](int64_t at, auto lanes) GRADWIRE_LAMBDA {
        const F8 value = load(source + at, lanes) * scale;
        if (residual) hold_back<To>(residual + at, value, lanes);
        return value;
    };
    const auto cast_lanes = [&](int64_t at, auto lanes, int) GRADWIRE_LAMBDA { store(out + at, scaled(at, lanes), lanes); };
    int64_t start = STREAMS ? unaligned(out, numel) : 0;
    if (STREAMS) {
        if (start) cast_lanes(0, Part{start}, 0);
        for (; start + 8 * LANES <= numel; start += 8 * LANES)
            for (int j = 0; j < 8; ++j) stream(out + start + j * LANES, scaled(start + j * LANES, Whole{}));
        end_stream();
    }
    over_lanes<8>(start, numel, cast_lanes);
}

inline void cast(const CastJob& job, int64_t first, int64_t last) {
    with_element(job.from, [&](auto* from_element) {
        with_element(job.to, [&](auto* to_element) {
            const auto* source = static_cast<const std::remove_pointer_t<decltype(from_element)>*>(job.source) + first;
            auto* out = static_cast<decltype(to_element)>(job.out) + first;
            float* residual = job.residual ? job.residual + first : nullptr;
            if (job.streams) cast_all<true>(source, out, residual, last - first, job.scale);
            else cast_all<false>(source, out, residual, last - first, job.scale);
        });
    });
}

}  // namespace gradwire::GRADWIRE_LEVEL
