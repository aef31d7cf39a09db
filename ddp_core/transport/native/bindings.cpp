// Shared memory for Python, and the sums in it. Memory lives as long as tensors in it do. Waits release the GIL.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <memory>

#include "shared_shares.hpp"
#include "shared_sums.hpp"

namespace py = pybind11;

namespace gradwire {

namespace {

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434  // on all architectures
#endif
constexpr unsigned CLOSE_ON_EXEC = 1;

[[noreturn]] void raise_last_error() {
    PyErr_SetFromErrno(PyExc_OSError);
    throw py::error_already_set();
}

int checked(int64_t answer) {
    if (answer < 0) raise_last_error();
    return static_cast<int>(answer);
}

// os.memfd_create and os.pidfd_open, which not every build of Python has.
int memory_file(const char* name) { return checked(syscall(SYS_memfd_create, name, CLOSE_ON_EXEC)); }
int process_file(int process) { return checked(syscall(SYS_pidfd_open, process, 0)); }

// A file mapped to be written by all who map it; the mmap of Python's library keeps one more file open.
class Memory {
public:
    Memory(int file, size_t size) : size_(size) {
        begin_ = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (begin_ == MAP_FAILED) raise_last_error();
    }
    ~Memory() { munmap(begin_, size_); }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;

    char* begin() const { return static_cast<char*>(begin_); }
    py::buffer_info info() const { return py::buffer_info(begin(), 1, "B", static_cast<ssize_t>(size_)); }

private:
    void* begin_;
    size_t size_;
};

struct WithoutGil {
    template <class Sums>
    void operator()(Sums* sums) const {
        const py::gil_scoped_release released;
        delete sums;
    }
};
template <class Sums>
using Holder = std::unique_ptr<Sums, WithoutGil>;

template <class Sums>
Holder<Sums> made(const std::vector<const Memory*>& memories, size_t rank,
            const std::vector<std::tuple<size_t, size_t, size_t>>& buckets) {
    std::vector<char*> begins;
    for (const Memory* memory : memories) begins.push_back(memory->begin());
    std::vector<Bucket> all;
    for (const auto& [offset, numel, element_size] : buckets) all.push_back({offset, numel, element_size});
    return Holder<Sums>(new Sums(std::move(begins), rank, std::move(all)));
}

}  // namespace

}  // namespace gradwire

PYBIND11_MODULE(_shared, module) {
    using namespace gradwire;
    const py::call_guard<py::gil_scoped_release> released;
    module.def("memory_file", &memory_file).def("process_file", &process_file);
    py::class_<Memory>(module, "Memory", py::buffer_protocol())
        .def(py::init<int, size_t>())
        .def_buffer(&Memory::info);
    py::class_<SharedSums, Holder<SharedSums>>(module, "SharedSums")
        .def(py::init(&made<SharedSums>), py::keep_alive<1, 2>())
        .def_static("header_bytes", &SharedSums::header_bytes)
        .def("arrive", &SharedSums::arrive)
        .def("wait", &SharedSums::wait, released)
        .def("is_there", &SharedSums::is_there)
        .def("since", &SharedSums::since)
        .def("missing", &SharedSums::missing)
        .def("give_up", &SharedSums::give_up, released)
        .def("given_up", &SharedSums::given_up);
    py::class_<SharedShares, Holder<SharedShares>>(module, "SharedShares")
        .def(py::init(&made<SharedShares>), py::keep_alive<1, 2>())
        .def_static("header_bytes", &SharedShares::header_bytes)
        .def("arrive", &SharedShares::arrive)
        .def("wait", &SharedShares::wait, released)
        .def("since", &SharedShares::since)
        .def("missing", &SharedShares::missing)
        .def("sum", &SharedShares::sum, released)
        .def("share", &SharedShares::share, released)
        .def("give_up", &SharedShares::give_up, released)
        .def("given_up", &SharedShares::given_up);
}
