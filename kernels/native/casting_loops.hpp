// Changes of number format, and whether numbers are finite.
namespace gradwire::GRADWIRE_LEVEL {

template <bool STREAMS, class From, class To>
void cast_all(const From* source, To* out, int64_t numel, float scale) {
    const auto cast_lanes = [&](int64_t at, auto lanes, int) GRADWIRE_LAMBDA {
        store(out + at, load(source + at, lanes) * scale, lanes);
    };
    int64_t start = STREAMS ? unaligned(out, numel) : 0;
    if (STREAMS) {
        if (start) cast_lanes(0, Part{start}, 0);
        for (; start + 8 * LANES <= numel; start += 8 * LANES)
            for (int j = 0; j < 8; ++j) stream(out + start + j * LANES, load(source + start + j * LANES) * scale);
        end_stream();
    }
    over_lanes<8>(start, numel, cast_lanes);
}

inline void cast(const CastJob& job, int64_t first, int64_t last) {
    with_element(job.from, [&](auto* from_element) {
        with_element(job.to, [&](auto* to_element) {
            const auto* source = static_cast<const std::remove_pointer_t<decltype(from_element)>*>(job.source) + first;
            auto* out = static_cast<decltype(to_element)>(job.out) + first;
            if (job.streams) cast_all<true>(source, out, last - first, job.scale);
            else cast_all<false>(source, out, last - first, job.scale);
        });
    });
}

template <class Element>
bool finite_all(const Element* source, int64_t numel) {
    constexpr int64_t RUN = 1 << 15;  // elements between two looks at what was found
    for (int64_t start = 0; start < numel; start += RUN) {
        I8 largest[4] = {};
        over_lanes<4>(start, start + RUN < numel ? start + RUN : numel,
                      [&](int64_t at, auto lanes, int turn) GRADWIRE_LAMBDA {
                          const I8 size = magnitude(load(source + at, lanes));
                          largest[turn] = size > largest[turn] ? size : largest[turn];
                      });
        for (const I8& part : largest)
            if (mask(part >= 0x7f800000)) return false;
    }
    return true;
}

// Whether no element is infinite or NaN.
inline bool finite(const void* source, Format format, int64_t first, int64_t last) {
    return with_element(format, [=](auto* element) {
        return finite_all(static_cast<const std::remove_pointer_t<decltype(element)>*>(source) + first, last - first);
    });
}

}  // namespace gradwire::GRADWIRE_LEVEL
