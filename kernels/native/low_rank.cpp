// The products of PowerSGD: all matrices of a bucket in one go.
#include <memory>
#include <vector>

#include "operations.hpp"
#include "threads.hpp"

namespace gradwire {

namespace {

constexpr int64_t ROWS = 8;            // of a panel: no piece ends within one
constexpr int64_t CHUNK = 1 << 18;     // elements of a piece with sums of its own
constexpr int64_t ROWS_A_VECTOR = 32;  // of such a piece, at least: its sums are then few against what is read

using Loop = void (*)(const LowRankJob&);

// Some rows of a matrix, and the buffer in which its Q lies.
struct Piece {
    Matrix matrix;
    int64_t first, last;
    float* q;
};

int64_t elements_of(const LowRankBuffers& buffers) {
    int64_t total = 0;
    for (int64_t i = 0; i < buffers.count; ++i) total += buffers.matrices[i].rows * buffers.matrices[i].columns;
    return total;
}

// Rows of part `part` of a matrix that is cut into `parts`.
Piece piece_of(const Matrix& m, int64_t parts, int64_t part, float* q) {
    return {m, cut(m.rows, parts, part, ROWS), cut(m.rows, parts, part + 1, ROWS), q};
}

void run(const LowRankBuffers& buffers, const std::vector<Piece>& pieces, int64_t threads, Loop loop) {
    const int64_t count = static_cast<int64_t>(pieces.size());
    const Shares shares(threads, elements_of(buffers), count);
    share(shares, [&](int64_t part, int64_t) {
        for (int64_t i = cut(count, shares.parts, part); i < cut(count, shares.parts, part + 1); ++i) {
            const Piece& piece = pieces[static_cast<size_t>(i)];
            loop({&piece.matrix, piece.first, piece.last, buffers.grad, buffers.format, buffers.residual, buffers.p,
                  piece.q});
        }
    });
}

// Rows that depend on no others: about as many elements in each piece as each thread should take at a time.
void run_by_rows(const LowRankBuffers& buffers, int64_t threads, Loop loop) {
    const int64_t total = elements_of(buffers), elements = total / Shares(threads, total).parts + 1;
    std::vector<Piece> pieces;
    for (const Matrix* m = buffers.matrices; m != buffers.matrices + buffers.count; ++m) {
        const int64_t most = std::max<int64_t>(m->rows / ROWS, 1);
        const int64_t parts = std::clamp<int64_t>(m->rows * m->columns / elements, 1, most);
        for (int64_t part = 0; part < parts; ++part) pieces.push_back(piece_of(*m, parts, part, buffers.q));
    }
    run(buffers, pieces, threads, loop);
}

// Sums over the rows of each matrix: a first piece has them in Q, the others one behind the other in memory of their own.
// How a matrix is cut depends on itself alone, so that the sums do.
class Sums {
  public:
    explicit Sums(const LowRankBuffers& buffers) {
        int64_t numel = 0;
        for (const Matrix* m = buffers.matrices; m != buffers.matrices + buffers.count; ++m) {
            const int64_t most = std::max<int64_t>(m->rows / (ROWS_A_VECTOR * m->rank), 1);
            const int64_t parts = std::clamp<int64_t>(m->rows * m->columns / CHUNK, 1, most);
            pieces_.push_back(piece_of(*m, parts, 0, buffers.q));
            for (int64_t part = 1; part < parts; ++part) {
                pieces_.push_back(piece_of(*m, parts, part, nullptr));
                pieces_.back().matrix.right_offset = numel;
                numel += m->rank * m->columns;
            }
        }
        others_.reset(new float[static_cast<size_t>(numel)]);
        for (Piece& piece : pieces_)
            if (!piece.q) piece.q = others_.get();
    }

    const std::vector<Piece>& pieces() const { return pieces_; }

    // Adds the others to the first, in order.
    void add_up() const {
        float* total = nullptr;
        for (const Piece& piece : pieces_) {
            float* const own = piece.q + piece.matrix.right_offset;
            if (piece.q == others_.get())
                for (int64_t i = 0; i < piece.matrix.rank * piece.matrix.columns; ++i) total[i] += own[i];
            else total = own;
        }
    }

  private:
    std::vector<Piece> pieces_;
    std::unique_ptr<float[]> others_;
};

}  // namespace

void low_rank_left(LowRankBuffers buffers, int64_t threads) {
    buffers.residual = around_caches(buffers.residual, elements_of(buffers));
    run_by_rows(buffers, threads, level().left);
}

void low_rank_right(LowRankBuffers buffers, int64_t threads) {
    const Sums sums(buffers);
    run(buffers, sums.pieces(), threads, level().right);
    sums.add_up();
}

void low_rank_finish(LowRankBuffers buffers, int64_t threads) { run_by_rows(buffers, threads, level().finish); }

}  // namespace gradwire
