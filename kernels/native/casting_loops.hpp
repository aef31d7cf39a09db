// Changes of number format.
namespace gradwire::GRADWIRE_LEVEL {

template <class From, class To>
void cast_all(const From* source, To* out, int64_t numel, float scale) {
    const int64_t whole = numel / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES) store(out + i, load(source + i) * scale);
    if (whole < numel) store(out + whole, load(source + whole, numel - whole) * scale, numel - whole);
}

inline void cast(const void* source, Format from, void* out, Format to, int64_t numel, float scale) {
    with_element(from, [=](auto* from_element) {
        with_element(to, [=](auto* to_element) {
            cast_all(static_cast<const std::remove_pointer_t<decltype(from_element)>*>(source),
                     static_cast<decltype(to_element)>(out), numel, scale);
        });
    });
}

}  // namespace gradwire::GRADWIRE_LEVEL
