// Orthonormal bases and unit vectors of factors that lie transposed, one vector behind the other. All levels round
// alike, so that ranks on different processors agree: no operation is fused, and sums have one order.
namespace gradwire::GRADWIRE_LEVEL {

using F4 = float __attribute__((vector_size(16)));
using D4 = double __attribute__((vector_size(32)));

// The largest magnitude; infinity or NaN where there is one.
inline float largest_magnitude(const float* vector, int64_t count) {
    I8 largest = {};
    over_lanes<1>(0, count, [&](int64_t at, auto lanes, int) GRADWIRE_LAMBDA {
        const I8 size = magnitude(load(vector + at, lanes));
        largest = size > largest ? size : largest;
    });
    int32_t most = 0;
    for (int lane = 0; lane < LANES; ++lane) most = largest[lane] > most ? largest[lane] : most;
    return bit_cast<float>(most);
}

inline void fill_with(float* vector, int64_t count, float value) {
    for (int64_t i = 0; i < count; ++i) vector[i] = value;
}

// In float64, in which squares of float32 numbers neither overflow nor vanish.
inline double sum_of_squares(const float* vector, int64_t count) {
    D4 low = {}, high = {};
    over_lanes<1>(0, count, [&](int64_t at, auto lanes, int) GRADWIRE_LAMBDA {
        F4 halves[2];
        const F8 value = load(vector + at, lanes);
        std::memcpy(halves, &value, sizeof(value));
        const D4 first = __builtin_convertvector(halves[0], D4), second = __builtin_convertvector(halves[1], D4);
        low += first * first;
        high += second * second;
    });
    const D4 both = low + high;
    return (both[0] + both[1]) + (both[2] + both[3]);
}

inline float dot(const float* a, const float* b, int64_t count) {
    F8 sums[4] = {};
    over_lanes<4>(0, count, [&](int64_t at, auto lanes, int turn) GRADWIRE_LAMBDA {
        sums[turn] += load(a + at, lanes) * load(b + at, lanes);
    });
    return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// `to -= factor * from`
inline void subtract(float* to, float factor, const float* from, int64_t count) {
    const F8 scale = broadcast(factor);
    over_lanes<4>(0, count, [&](int64_t at, auto lanes, int) GRADWIRE_LAMBDA {
        store(to + at, load(to + at, lanes) - scale * load(from + at, lanes), lanes);
    });
}

// `vector = vector * factor`, the product in float64.
inline void multiply(float* vector, double factor, int64_t count) {
    for (int64_t i = 0; i < count; ++i) vector[i] = static_cast<float>(vector[i] * factor);
}

// A reflection H = I - weight v v^T, v = (1, tail), that takes `vector` to a multiple of the first unit vector, of the
// sign opposite to its first element's. The tail replaces that of the vector; a tail of zeros has weight 0, and H = I.
inline float reflection(float* vector, int64_t count) {
    const double squares = sum_of_squares(vector + 1, count - 1), first = vector[0];
    if (squares == 0) return 0;
    const double length = __builtin_sqrt(first * first + squares);
    multiply(vector + 1, 1 / (first + __builtin_copysign(length, first)), count - 1);
    return static_cast<float>(2 / (1 + sum_of_squares(vector + 1, count - 1)));
}

// Applies the reflection of weight `weight` and tail `tail` to a vector.
inline void reflect(float* vector, float weight, const float* tail, int64_t count) {
    const float part = weight * (vector[0] + dot(vector + 1, tail, count - 1));
    vector[0] -= part;
    subtract(vector + 1, part, tail, count - 1);
}

inline bool zero_row(const float* vectors, int64_t rank, int64_t rows, int64_t row) {
    for (int64_t j = 0; j < rank; ++j)
        if (vectors[j * rows + row] != 0) return false;
    return true;
}

inline void swap_rows(float* vectors, int64_t rank, int64_t rows, int64_t one, int64_t other) {
    for (int64_t j = 0; j < rank && one != other; ++j) {
        const float value = vectors[j * rows + one];
        vectors[j * rows + one] = vectors[j * rows + other];
        vectors[j * rows + other] = value;
    }
}

// Brings rows that are not zero to the first places, which reflections fill in. `places`: where each came from.
inline void zero_rows_last(float* vectors, int64_t rank, int64_t rows, int64_t* places) {
    int64_t next = 0;
    for (int64_t k = 0; k < rank; ++k) {
        next = next > k ? next : k;
        while (next < rows && zero_row(vectors, rank, rows, next)) ++next;
        places[k] = next < rows ? next : k;
        swap_rows(vectors, rank, rows, k, places[k]);
        ++next;
    }
}

// Householder QR of `rank` vectors, at most LARGEST_RANK and `rows`; they become the columns of Q. Rows of zeros stay so
// in all vectors that are not completions.
inline void orthogonalize(float* vectors, int64_t rank, int64_t rows) {
    const float largest = largest_magnitude(vectors, rank * rows);
    if (!(largest < __builtin_inff())) return fill_with(vectors, rank * rows, __builtin_nanf(""));
    if (largest > 0)  // at most 1 in magnitude: products then do not overflow
        over_lanes<4>(0, rank * rows, [&](int64_t at, auto lanes, int) GRADWIRE_LAMBDA {
            store(vectors + at, load(vectors + at, lanes) / largest, lanes);
        });
    float weights[LARGEST_RANK];
    int64_t places[LARGEST_RANK];
    zero_rows_last(vectors, rank, rows, places);
    for (int64_t k = 0; k < rank; ++k) {
        float* vector = vectors + k * rows + k;
        weights[k] = reflection(vector, rows - k);
        if (weights[k] == 0) continue;
        for (int64_t j = k + 1; j < rank; ++j) reflect(vectors + j * rows + k, weights[k], vector + 1, rows - k);
    }
    for (int64_t k = rank - 1; k >= 0; --k) {  // Q = H_0 H_1 ... applied to unit vectors, from the last on
        float* vector = vectors + k * rows + k;
        for (int64_t j = k + 1; j < rank; ++j) reflect(vectors + j * rows + k, weights[k], vector + 1, rows - k);
        multiply(vector + 1, -weights[k], rows - k - 1);
        vector[0] = 1 - weights[k];
        fill_with(vector - k, k, 0.0f);
    }
    for (int64_t k = rank - 1; k >= 0; --k) swap_rows(vectors, rank, rows, k, places[k]);
}

// Scales a vector to length 1; one of zeros becomes `previous`, or stays where that is null; one that is not finite is
// NaN.
inline void normalize(float* vector, const float* previous, int64_t count) {
    const double length = __builtin_sqrt(sum_of_squares(vector, count));
    if (length > 0 && length < __builtin_inf()) multiply(vector, 1 / length, count);
    else if (length != 0) fill_with(vector, count, __builtin_nanf(""));
    else if (previous) std::memcpy(vector, previous, static_cast<size_t>(count) * sizeof(float));
}

}  // namespace gradwire::GRADWIRE_LEVEL
