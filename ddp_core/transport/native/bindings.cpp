// Shared memory for Python, and the sums in it. Memory lives as long as what was made of it. Waits release the GIL.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <stdexcept>
#include <string>

#include "python_classes.hpp"
#include "shared_shares.hpp"
#include "shared_sums.hpp"

namespace gradwire {

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434  // on all architectures
#endif
constexpr unsigned CLOSE_ON_EXEC = 1, ALLOW_SEALING = 2;
constexpr int ADD_SEALS = 1033, KEEP_SEALS = 1, KEEP_FROM_SHRINKING = 2, KEEP_FROM_GROWING = 4;  // as of fcntl
constexpr mode_t OWNER_ONLY = 0600;

[[noreturn]] void throw_last_error() { throw std::system_error(errno, std::generic_category()); }

int checked(int64_t answer) {
    if (answer < 0) throw_last_error();
    return static_cast<int>(answer);
}

// os.memfd_create and os.pidfd_open, which not every build of Python has.
int memory_file(const std::string& name) {
    const int file = checked(syscall(SYS_memfd_create, name.c_str(), CLOSE_ON_EXEC | ALLOW_SEALING));
    if (fchmod(file, OWNER_ONLY) == 0) return file;
    const int error = errno;
    close(file);
    throw std::system_error(error, std::generic_category());
}
// Nobody changes the file's size from now on: who has mapped a file that another one shrinks is killed.
int seal_size(int file) { return checked(fcntl(file, ADD_SEALS, KEEP_SEALS | KEEP_FROM_SHRINKING | KEEP_FROM_GROWING)); }
int process_file(int process) { return checked(syscall(SYS_pidfd_open, process, 0)); }

// Throws where a file is shorter: whoever touched memory beyond its end would be killed.
void check_holds(int file, size_t size) {
    struct stat found;
    checked(fstat(file, &found));
    const auto held = static_cast<size_t>(found.st_size);
    if (size == 0 || size > held)
        throw std::invalid_argument("a memory takes from 1 to all of its file's " + std::to_string(held) +
                                    " bytes, got " + std::to_string(size));
}

// A file mapped to be written by all who map it; the mmap of Python's library keeps one more file open.
class Memory {
public:
    Memory(int file, size_t size) : size_(size) {
        check_holds(file, size);
        begin_ = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (begin_ == MAP_FAILED) throw_last_error();
    }
    ~Memory() { munmap(begin_, size_); }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;

    char* begin() const { return static_cast<char*>(begin_); }
    size_t size() const { return size_; }

    // What numpy makes an array of, which keeps the instance; the limited API has no buffers before Python 3.11.
    PyObject* array_interface() const {
        return Py_BuildValue("{s:(NO),s:(n),s:s,s:i}", "data", PyLong_FromVoidPtr(begin_), Py_False, "shape",
                             static_cast<Py_ssize_t>(size_), "typestr", "|u1", "version", 3);
    }

private:
    void* begin_;
    size_t size_;
};

// The place of a bucket: offset, elements, and bytes of one.
void convert(PyObject* given, Bucket& bucket) {
    std::vector<size_t> numbers;
    convert(given, numbers);
    if (numbers.size() != 3) refuse("three numbers for each bucket");
    bucket = {numbers[0], numbers[1], numbers[2]};
}

namespace {

std::shared_ptr<Memory> map_file(int file, size_t size) { return std::make_shared<Memory>(file, size); }

using Memories = std::vector<std::shared_ptr<Memory>>;

bool lies_between(size_t begin, size_t end, const Bucket& bucket) {
    const auto [offset, numel, bytes] = bucket;
    if (numel == 0) return true;
    if ((bytes != sizeof(float) && bytes != sizeof(double)) || offset % bytes != 0) return false;
    return begin <= offset && offset <= end && numel <= (end - offset) / bytes;
}

// Throws where counters or a bucket would lie outside of a memory, or one in the other.
void check_places(size_t header, const Memories& memories, const std::vector<Bucket>& buckets) {
    for (const auto& memory : memories) {
        const std::string begin = std::to_string(header), end = std::to_string(memory->size());
        if (memory->size() < header) throw std::invalid_argument("a memory needs " + begin + " bytes, got " + end);
        if (!std::all_of(buckets.begin(), buckets.end(),
                         [&](const Bucket& each) { return lies_between(header, memory->size(), each); }))
            throw std::invalid_argument("buckets have to lie from byte " + begin + " to " + end +
                                        " of a memory, aligned, with elements of 4 or 8 bytes");
    }
}

template <class Sums>
std::shared_ptr<Sums> make(const Memories& memories, size_t rank, const std::vector<Bucket>& buckets) {
    check_index("rank", rank, memories.size());
    check_places(Sums::header_bytes(buckets.size(), memories.size()), memories, buckets);
    std::vector<char*> begins;
    for (const auto& memory : memories) begins.push_back(memory->begin());
    return {new Sums(std::move(begins), rank, buckets), [memories](Sums* sums) { delete sums; }};  // memories end later
}

PyMethodDef functions[] = {
    method<memory_file, Gil::kept>("memory_file"),
    method<seal_size, Gil::kept>("seal_size"),
    method<process_file, Gil::kept>("process_file"),
    {},
};

PyMethodDef no_methods[] = {{}};
PyGetSetDef no_attributes[] = {{}};
PyGetSetDef memory_attributes[] = {
    {"__array_interface__", attribute<Memory, &Memory::array_interface>, nullptr, nullptr, nullptr},
    {},
};

PyMethodDef sums_methods[] = {
    method<SharedSums::header_bytes, Gil::kept>("header_bytes", METH_STATIC),
    method<SharedSums, &SharedSums::arrive, Gil::kept>("arrive"),
    method<SharedSums, &SharedSums::wait, Gil::released>("wait"),
    method<SharedSums, &SharedSums::is_there, Gil::kept>("is_there"),
    method<SharedSums, &SharedSums::since, Gil::kept>("since"),
    method<SharedSums, &SharedSums::missing, Gil::kept>("missing"),
    method<SharedSums, &SharedSums::give_up, Gil::released>("give_up"),
    method<SharedSums, &SharedSums::given_up, Gil::kept>("given_up"),
    {},
};

PyMethodDef shares_methods[] = {
    method<SharedShares::header_bytes, Gil::kept>("header_bytes", METH_STATIC),
    method<SharedShares, &SharedShares::arrive, Gil::kept>("arrive"),
    method<SharedShares, &SharedShares::wait, Gil::released>("wait"),
    method<SharedShares, &SharedShares::since, Gil::kept>("since"),
    method<SharedShares, &SharedShares::missing, Gil::kept>("missing"),
    method<SharedShares, &SharedShares::sum, Gil::released>("sum"),
    method<SharedShares, &SharedShares::share, Gil::released>("share"),
    method<SharedShares, &SharedShares::give_up, Gil::released>("give_up"),
    method<SharedShares, &SharedShares::given_up, Gil::kept>("given_up"),
    {},
};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_shared_memory", "Sums in memory that processes share.", -1, functions,
};

}  // namespace

}  // namespace gradwire

#define PACKAGE "gradwire.ddp_core.transport._shared_memory."

PyMODINIT_FUNC PyInit__shared_memory() {
    using namespace gradwire;
    return guarded([] {
        Object module = owned(PyModule_Create(&definition));
        add_class<Memory, map_file>(module.get(), PACKAGE "Memory", no_methods, memory_attributes);
        add_class<SharedSums, make<SharedSums>>(module.get(), PACKAGE "SharedSums", sums_methods, no_attributes);
        add_class<SharedShares, make<SharedShares>>(module.get(), PACKAGE "SharedShares", shares_methods, no_attributes);
        return module.release();
    });
}
