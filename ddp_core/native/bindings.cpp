// Sums in shared memory for Python: mappings come in as buffers, which live on with the object. The GIL is released.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>

#include "shared_sums.hpp"

namespace py = pybind11;

namespace gradwire {

namespace {

std::unique_ptr<SharedSums> made(const std::vector<py::buffer>& maps, size_t rank,
                                 const std::vector<std::tuple<size_t, size_t, size_t>>& buckets) {
    std::vector<char*> begins;
    for (const py::buffer& map : maps) begins.push_back(static_cast<char*>(map.request(true).ptr));
    std::vector<Bucket> all;
    for (const auto& [offset, numel, element_size] : buckets) all.push_back({offset, numel, element_size});
    return std::make_unique<SharedSums>(std::move(begins), rank, std::move(all));
}

}  // namespace

}  // namespace gradwire

PYBIND11_MODULE(_shared, module) {
    using gradwire::SharedSums;
    const py::call_guard<py::gil_scoped_release> released;
    py::class_<SharedSums>(module, "SharedSums")
        .def(py::init(&gradwire::made), py::keep_alive<1, 2>())
        .def_static("header_bytes", &SharedSums::header_bytes)
        .def("arrive", &SharedSums::arrive)
        .def("wait", &SharedSums::wait, released)
        .def("is_there", &SharedSums::is_there)
        .def("since", &SharedSums::since)
        .def("missing", &SharedSums::missing)
        .def("give_up", &SharedSums::give_up, released)
        .def("given_up", &SharedSums::given_up);
}
