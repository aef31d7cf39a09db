// Whether numbers are finite.
namespace gradwire::GRADWIRE_LEVEL {

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
