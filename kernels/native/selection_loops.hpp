// Selection of the largest magnitudes: samples, candidates above a threshold, and what is sent of those chosen.
namespace gradwire::GRADWIRE_LEVEL {

// The bits of |value|, those of infinity for NaN: as integers they are ordered like magnitudes.
GRADWIRE_INLINE I8 ordered_magnitude(F8 value) {
    const I8 bits = magnitude(value), infinity = I8{} + 0x7f800000;
    return bits > infinity ? infinity : bits;
}

template <class Element>
void sample_row(const Row& row, const int64_t* indices, int64_t count, uint32_t* magnitudes) {
    const Element* grad = static_cast<const Element*>(row.grad);
    for (int64_t i = 0; i < count; ++i) {
        F8 value = load(grad + indices[i], 1);
        if (row.residual) value += broadcast(row.residual[indices[i]]);
        magnitudes[i] = static_cast<uint32_t>(ordered_magnitude(value)[0]);
    }
}

inline void sample(const Row& row, const int64_t* indices, int64_t count, uint32_t* magnitudes) {
    with_element(row.format, [&](auto* element) {
        sample_row<std::remove_pointer_t<decltype(element)>>(row, indices, count, magnitudes);
    });
}

// Magnitudes of `count` elements, at most LANES; with a sum, the gradient goes into the residual first.
template <class Element, bool ADD>
GRADWIRE_INLINE I8 scan_lanes(const Element* grad, float* residual, int64_t count) {
    const bool full = count == LANES;
    F8 value = full ? load(grad) : load(grad, count);
    if (ADD) {
        value += full ? load(residual) : load(residual, count);
        full ? store(residual, value) : store(residual, value, count);
    }
    return ordered_magnitude(value);
}

// Elements of [first, last) that reach the threshold, in order; room for all of them. Returns their number.
template <class Element, bool ADD>
int64_t scan_row(const Element* grad, float* residual, int64_t first, int64_t last, uint32_t threshold,
                 Candidates found) {
    constexpr int64_t STEP = 4 * LANES;
    const I8 below = I8{} + static_cast<int32_t>(threshold) - 1;
    int64_t total = 0;
    for (int64_t i = first; i < last; i += STEP) {
        I8 magnitudes[4] = {};
        uint32_t reached = 0;
        for (int j = 0; j < 4; ++j) {
            const int64_t at = i + j * LANES, left = last - at, count = left < LANES ? left : LANES;
            if (count <= 0) break;
            magnitudes[j] = scan_lanes<Element, ADD>(grad + at, ADD ? residual + at : nullptr, count);
            const uint32_t inside = (1u << count) - 1u;
            reached |= (mask(magnitudes[j] > below) & inside) << (8 * j);
        }
        if (!reached) continue;
        int32_t lanes[STEP];
        std::memcpy(lanes, magnitudes, sizeof(lanes));
        for (; reached; reached &= reached - 1, ++total) {
            const int lane = __builtin_ctz(reached);
            found.indices[total] = i + lane;
            found.magnitudes[total] = static_cast<uint32_t>(lanes[lane]);
        }
    }
    return total;
}

inline int64_t scan(const Row& row, bool add, int64_t first, int64_t last, uint32_t threshold, Candidates found) {
    if (row.residual && !add) return scan_row<float, false>(row.residual, nullptr, first, last, threshold, found);
    return with_element(row.format, [&](auto* element) {
        const auto* grad = static_cast<const std::remove_pointer_t<decltype(element)>*>(row.grad);
        using Element = std::remove_pointer_t<decltype(element)>;
        return add ? scan_row<Element, true>(grad, row.residual, first, last, threshold, found)
                   : scan_row<Element, false>(grad, nullptr, first, last, threshold, found);
    });
}

template <class Value>
constexpr float largest_finite() {
    return std::is_same_v<Value, Float16> ? 65504.0f : std::is_same_v<Value, BFloat16> ? 0x1.fep127f : 0x1.fffffep127f;
}

// Finite numbers within the range of the format, infinities and NaN as they are.
template <class Value>
GRADWIRE_INLINE F8 in_range(F8 value) {
    const F8 limit = broadcast(largest_finite<Value>());
    const I8 beyond = (absolute(value) > limit) & (magnitude(value) < 0x7f800000);
    const U8 clamped = bit_cast<U8>(limit) | (bit_cast<U8>(value) & 0x80000000u);
    return bit_cast<F8>((bit_cast<U8>(beyond) & clamped) | (~bit_cast<U8>(beyond) & bit_cast<U8>(value)));
}

template <class Element, class Value>
void take_chosen(const Element* grad, float* residual, const int64_t* indices, int64_t count, Value* values) {
    for (int64_t i = 0; i < count; i += LANES) {
        const int64_t size = count - i < LANES ? count - i : LANES;
        F8 value = {};
        for (int64_t j = 0; j < size; ++j)
            value[j] = residual ? residual[indices[i + j]] : load(grad + indices[i + j], 1)[0];
        Value sent[LANES];
        store(sent, in_range<Value>(value));
        std::memcpy(values + i, sent, static_cast<size_t>(size) * sizeof(Value));
        if (!residual) continue;
        const F8 rest = value - load(sent);
        for (int64_t j = 0; j < size; ++j) residual[indices[i + j]] = rest[j];
    }
}

// Writes the chosen elements as they are sent; the residual keeps what rounding loses.
inline void take(const Row& row, const int64_t* indices, int64_t count, void* values, Format to) {
    with_element(row.format, [&](auto* from_element) {
        with_element(to, [&](auto* to_element) {
            take_chosen(static_cast<const std::remove_pointer_t<decltype(from_element)>*>(row.grad), row.residual,
                        indices, count, static_cast<decltype(to_element)>(values));
        });
    });
}

}  // namespace gradwire::GRADWIRE_LEVEL
