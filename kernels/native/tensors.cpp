// DLPack's exchange API: a table of C functions that torch.Tensor carries. The structures are those of DLPack 1.
#include "tensors.hpp"

namespace py = pybind11;

namespace gradwire {

namespace {

constexpr uint32_t MAJOR = 1;
constexpr int32_t CPU = 1;
constexpr uint8_t FLOAT = 2, BRAIN_FLOAT = 4;

struct Tensor {
    void* data;
    int32_t device_type, device;
    int32_t dimensions;
    uint8_t kind, bits;
    uint16_t lanes;
    int64_t* shape;
    int64_t* strides;
    uint64_t byte_offset;
};

struct Exchange {
    uint32_t major, minor;
    Exchange* previous;
    void* allocate;
    void* managed_from_object;
    void* managed_to_object;
    int (*from_object)(void* object, Tensor* tensor);  // borrows; may be null
    void* current_stream;
};

// Names and dtypes of torch, looked up once; never given back.
struct Names {
    PyObject *data_ptr, *dtype, *stride, *bfloat16, *float16, *int64;
};

Names names{};

PyTypeObject* tensor_type = nullptr;
int (*from_object)(void*, Tensor*) = nullptr;

bool is_dense(const Tensor& tensor, int64_t numel) {
    int64_t step = 1;
    if (numel == 0) return true;
    for (int32_t each = tensor.dimensions; each-- > 0;) {
        if (tensor.shape[each] != 1 && tensor.strides != nullptr && tensor.strides[each] != step) return false;
        step *= tensor.shape[each];
    }
    return true;
}

}  // namespace

void learn_tensors() {
    const py::module_ torch = py::module_::import("torch");
    const auto dtype = [&](const char* name) { return py::object(torch.attr(name)).release().ptr(); };
    names = {PyUnicode_InternFromString("data_ptr"), PyUnicode_InternFromString("dtype"),
             PyUnicode_InternFromString("stride"),   dtype("bfloat16"),
             dtype("float16"),                       dtype("int64")};
    const py::object type = torch.attr("Tensor");
    const py::object capsule = py::getattr(type, "__dlpack_c_exchange_api__", py::none());
    if (!PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) return;
    auto* api = static_cast<Exchange*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    while (api != nullptr && api->major != MAJOR) api = api->previous;
    if (api == nullptr) return;
    tensor_type = reinterpret_cast<PyTypeObject*>(py::object(type).release().ptr());
    from_object = api->from_object;
}

Array array_of(py::handle tensor) {
    Array array;
    if (tensor.is_none()) return array;
    const auto call = [&](PyObject* name) {
        PyObject* found = PyObject_CallMethodNoArgs(tensor.ptr(), name);
        if (found == nullptr) throw py::error_already_set();
        return py::reinterpret_steal<py::object>(found);
    };
    array.address = call(names.data_ptr).cast<uintptr_t>();
    const py::object dtype = py::reinterpret_steal<py::object>(PyObject_GetAttr(tensor.ptr(), names.dtype));
    array.is_long = dtype.ptr() == names.int64;
    if (dtype.ptr() == names.bfloat16) array.format = Format::bfloat16;
    if (dtype.ptr() == names.float16) array.format = Format::float16;
    const py::tuple strides = call(names.stride);
    if (strides.size() > 1) array.outer = strides[0].cast<int64_t>();
    if (strides.size() > 2) array.inner = strides[1].cast<int64_t>();
    return array;
}

bool look(py::handle object, Flat& found) {
    if (from_object == nullptr || Py_TYPE(object.ptr()) != tensor_type) return false;
    Tensor tensor{};
    if (from_object(object.ptr(), &tensor) != 0) {
        PyErr_Clear();
        return false;
    }
    found.numel = 1;
    for (int32_t each = 0; each < tensor.dimensions; ++each) found.numel *= tensor.shape[each];
    if (tensor.device_type != CPU || tensor.lanes != 1 || !is_dense(tensor, found.numel)) return false;
    if (tensor.kind == FLOAT && tensor.bits == 32) {
        found.format = Format::float32;
    } else if (tensor.kind == FLOAT && tensor.bits == 16) {
        found.format = Format::float16;
    } else if (tensor.kind == BRAIN_FLOAT && tensor.bits == 16) {
        found.format = Format::bfloat16;
    } else {
        return false;
    }
    found.data = static_cast<char*>(tensor.data) + tensor.byte_offset;
    return tensor.data != nullptr || found.numel == 0;  // zeros may have no memory
}

}  // namespace gradwire
