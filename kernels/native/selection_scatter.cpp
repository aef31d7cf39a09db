// The mean of sparse rows: piece by piece of the output, which is in the nearest cache while all voters add to it.
#include <atomic>
#include <stdexcept>
#include <string>
#include <vector>

#include "operations.hpp"
#include "threads.hpp"

namespace gradwire {

namespace {

constexpr int64_t PIECE = 4096;  // elements

bool is_zero(const char* value, Format format) {
    uint32_t bits = 0;
    std::copy_n(value, size_of(format), reinterpret_cast<char*>(&bits));
    return (bits & (format == Format::float32 ? 0x7fffffffu : 0x7fffu)) == 0;
}

template <class Index>
class Scatter {
  public:
    Scatter(const ScatterJob& job, int64_t threads)
        : job_(job),
          threads_(threads),
          weight_(static_cast<float>(1.0 / static_cast<double>(job.voters))),
          counts_(static_cast<size_t>(job.voters * job.rows)) {}

    void run() {
        if (in_order()) by_pieces();
        else one_by_one();
    }

  private:
    const Index* places(int64_t voter, int64_t row) const {
        return static_cast<const Index*>(job_.indices) + voter * job_.index_voter_stride + row * job_.index_stride;
    }

    const char* values(int64_t voter, int64_t row) const {
        const int64_t first = voter * job_.value_voter_stride + row * job_.value_stride;
        return static_cast<const char*>(job_.values) + first * size_of(job_.value_format);
    }

    int64_t row_length(int64_t row) const {
        return std::clamp<int64_t>(job_.numel - row * job_.length, 0, job_.length);
    }

    // Whether the places of all rows ascend and lie inside, but for zeros at the end that stand for nothing; counts the
    // others.
    bool in_order() {
        const int64_t lists = job_.voters * job_.rows;
        const Shares shares(threads_, lists * job_.k, lists);
        std::atomic<bool> ordered{true};
        share(shares, [&](int64_t part, int64_t) {
            for (int64_t list = cut(lists, shares.parts, part); list < cut(lists, shares.parts, part + 1); ++list)
                if ((counts_[list] = ordered_count(list / job_.rows, list % job_.rows)) < 0) ordered.store(false);
        });
        return ordered.load();
    }

    // How many elements of a row are in order, what follows being zeros; -1 where there is more.
    int64_t ordered_count(int64_t voter, int64_t row) const {
        const Index* const first = places(voter, row);
        const Index* const last = first + job_.k;
        const Index least = job_.k ? *std::min_element(first, last) : 0;
        if (least < 0) throw std::out_of_range("a negative index: " + std::to_string(least));
        const Index* const end = std::lower_bound(first, std::is_sorted_until(first, last), row_length(row));
        const char* const value = values(voter, row);
        for (int64_t i = end - first; i < job_.k; ++i)
            if (!is_zero(value + i * size_of(job_.value_format), job_.value_format)) return -1;
        return end - first;
    }

    void by_pieces() {
        const int64_t pieces = (job_.numel + PIECE - 1) / PIECE;
        const Shares shares(threads_, job_.numel, pieces);
        share(shares, [&](int64_t part, int64_t) {
            add_range(cut(job_.numel, shares.parts, part, PIECE), cut(job_.numel, shares.parts, part + 1, PIECE));
        });
    }

    // Elements [first, last) of the output; a piece lies in one row.
    void add_range(int64_t first, int64_t last) const {
        const bool around = streams(Format::float32, job_.numel) && job_.length >= PIECE;
        std::vector<int64_t> next(static_cast<size_t>(job_.voters));
        float buffer[PIECE];
        for (int64_t at = first, end; at < last; at = end) {
            const int64_t row = at / job_.length, start = row * job_.length;
            const int64_t voters = row < job_.rows ? job_.voters : 0;
            end = std::min({last, at + PIECE, start + job_.length});
            if (at == first || at == start)
                for (int64_t voter = 0; voter < voters; ++voter) next[voter] = before(voter, row, at - start);
            float* const piece = around ? buffer : job_.out + at;
            std::fill(piece, piece + (end - at), 0.0f);
            for (int64_t voter = 0; voter < voters; ++voter)
                next[voter] = add_to_piece(voter, row, at - start, end - start, next[voter], piece);
            if (around)
                level().cast({buffer, Format::float32, job_.out + at, Format::float32, 1.0f, nullptr, true}, 0, end - at);
        }
    }

    // How many elements of a row lie before a place in it.
    int64_t before(int64_t voter, int64_t row, int64_t place) const {
        const Index* const first = places(voter, row);
        return std::lower_bound(first, first + counts_[voter * job_.rows + row], place) - first;
    }

    // Adds a voter's elements for places [first, last) of a row, from its element `next` on; returns the next after
    // them.
    int64_t add_to_piece(int64_t voter, int64_t row, int64_t first, int64_t last, int64_t next, float* piece) const {
        const Index* const place = places(voter, row);
        const int64_t count = counts_[voter * job_.rows + row];
        int64_t end = next;
        while (end < count && place[end] < last) ++end;
        const char* const value = values(voter, row) + next * size_of(job_.value_format);
        level().scatter({place + next, sizeof(Index) == 8, value, job_.value_format, end - next}, first, weight_,
                        piece);
        return end;
    }

    // For rows in any order, as they come; places past the end are the last.
    void one_by_one() const {
        std::fill(job_.out, job_.out + job_.numel, 0.0f);
        for (int64_t voter = 0; voter < job_.voters; ++voter)
            for (int64_t row = 0; row < job_.rows; ++row)
                for (int64_t i = 0; i < job_.k; ++i) {
                    const int64_t start = row * job_.length, last = job_.numel - 1 - start;
                    const int64_t place = start + std::min<int64_t>(places(voter, row)[i], last);
                    const char* const value = values(voter, row) + i * size_of(job_.value_format);
                    level().scatter({&place, true, value, job_.value_format, 1}, 0, weight_, job_.out);
                }
    }

    const ScatterJob& job_;
    const int64_t threads_;
    const float weight_;
    std::vector<int64_t> counts_;
};

}  // namespace

void scatter_mean(const ScatterJob& job, int64_t threads) {
    if (job.numel == 0) return;
    if (job.long_indices) Scatter<int64_t>(job, threads).run();
    else Scatter<int32_t>(job, threads).run();
}

}  // namespace gradwire
