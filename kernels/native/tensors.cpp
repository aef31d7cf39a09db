// DLPack's exchange API: a table of C functions that torch.Tensor carries. The structures are those of DLPack 1.
#include "tensors.hpp"

#include "python_functions.hpp"

namespace gradwire {

namespace {

constexpr uint32_t MAJOR = 1;
constexpr int32_t CPU = 1;
constexpr uint8_t INTEGER = 0, FLOAT = 2, BRAIN_FLOAT = 4;

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

// A torch.Tensor of the CPU, and of no subclass, seen without a call of Python.
bool borrow(PyObject* object, Tensor& tensor) {
    if (from_object == nullptr || Py_TYPE(object) != tensor_type) return false;
    if (from_object(object, &tensor) == 0) return tensor.device_type == CPU && tensor.lanes == 1;
    PyErr_Clear();
    return false;
}

char* begin(const Tensor& tensor) { return static_cast<char*>(tensor.data) + tensor.byte_offset; }

// Of numbers that are floats.
bool format_of(const Tensor& tensor, Format& format) {
    if (tensor.kind == FLOAT && tensor.bits == 32) {
        format = Format::float32;
    } else if (tensor.kind == FLOAT && tensor.bits == 16) {
        format = Format::float16;
    } else if (tensor.kind == BRAIN_FLOAT && tensor.bits == 16) {
        format = Format::bfloat16;
    } else {
        return false;
    }
    return true;
}

void set_strides(Array& array, int64_t dimensions, const int64_t* strides) {
    if (dimensions > 1) array.outer = strides[0];
    if (dimensions > 2) array.inner = strides[1];
}

Array seen(const Tensor& tensor) {
    Array array;
    array.address = reinterpret_cast<uintptr_t>(begin(tensor));
    format_of(tensor, array.format);
    array.is_long = tensor.kind == INTEGER && tensor.bits == 64;
    set_strides(array, tensor.dimensions, tensor.strides);
    return array;
}

// The same of another tensor, by its methods.
Array asked(PyObject* object) {
    const auto answer = [&](PyObject* name) { return owned(PyObject_CallMethodObjArgs(object, name, nullptr)); };
    const Object dtype = owned(PyObject_GetAttr(object, names.dtype));
    size_t address = 0;
    std::vector<int64_t> strides;
    convert(answer(names.data_ptr).get(), address);
    convert(answer(names.stride).get(), strides);
    Array array;
    array.address = address;
    if (dtype.get() == names.bfloat16) array.format = Format::bfloat16;
    if (dtype.get() == names.float16) array.format = Format::float16;
    array.is_long = dtype.get() == names.int64;
    set_strides(array, strides.size(), strides.data());
    return array;
}

}  // namespace

void learn_tensors() {
    const Object torch = owned(PyImport_ImportModule("torch"));
    const auto kept = [&](const char* name) { return owned(PyObject_GetAttrString(torch.get(), name)).release(); };
    names = {PyUnicode_InternFromString("data_ptr"), PyUnicode_InternFromString("dtype"),
             PyUnicode_InternFromString("stride"),   kept("bfloat16"),
             kept("float16"),                        kept("int64")};
    PyObject* type = kept("Tensor");
    tensor_type = reinterpret_cast<PyTypeObject*>(type);
    const Object capsule(PyObject_GetAttrString(type, "__dlpack_c_exchange_api__"));
    PyErr_Clear();
    if (!PyCapsule_IsValid(capsule.get(), "dlpack_exchange_api")) return;
    auto* api = static_cast<Exchange*>(PyCapsule_GetPointer(capsule.get(), "dlpack_exchange_api"));
    while (api != nullptr && api->major != MAJOR) api = api->previous;
    if (api != nullptr) from_object = api->from_object;
}

void convert(PyObject* object, Array& array) {
    Tensor tensor{};
    if (object == Py_None) {
        array = {};
    } else if (borrow(object, tensor) && (tensor.dimensions < 2 || tensor.strides != nullptr)) {
        array = seen(tensor);
    } else {
        try {
            array = asked(object);
        } catch (const ErrorIsSet&) {
            refuse("a torch.Tensor or None");
        }
    }
}

bool look(PyObject* object, Flat& found) {
    Tensor tensor{};
    if (!borrow(object, tensor)) return false;
    found.numel = 1;
    for (int32_t each = 0; each < tensor.dimensions; ++each) found.numel *= tensor.shape[each];
    found.data = begin(tensor);
    return is_dense(tensor, found.numel) && format_of(tensor, found.format) &&
           (tensor.data != nullptr || found.numel == 0);  // zeros may have no memory
}

}  // namespace gradwire
