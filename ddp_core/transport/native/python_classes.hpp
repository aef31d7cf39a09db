// Classes of C++ as classes of Python, on the limited API. An instance shares its object, which ends without the GIL.
#pragma once

#include <cstring>
#include <memory>

#include "../../../kernels/native/python_functions.hpp"

namespace gradwire {

template <class Class>
struct Instance {
    PyObject_HEAD
    std::shared_ptr<Class> object;

    static inline const char* name = nullptr;
    static inline PyTypeObject* type = nullptr;

    static Instance* of(PyObject* self) { return reinterpret_cast<Instance*>(self); }

    static void destroy(PyObject* self) {
        PyTypeObject* its = Py_TYPE(self);
        {
            const WithoutGil released;
            of(self)->object.~shared_ptr();
        }
        reinterpret_cast<freefunc>(PyType_GetSlot(its, Py_tp_free))(self);
        Py_DECREF(its);
    }
};

template <class Class>
void convert(PyObject* given, std::shared_ptr<Class>& value) {
    if (!PyObject_TypeCheck(given, Instance<Class>::type)) refuse(Instance<Class>::name);
    value = Instance<Class>::of(given)->object;
}

template <class Class>
PyObject* to_python(std::shared_ptr<Class> value) {
    Object self = owned(PyType_GenericAlloc(Instance<Class>::type, 0));
    new (&Instance<Class>::of(self.get())->object) std::shared_ptr<Class>(std::move(value));
    return self.release();
}

template <class Class, auto make>
PyObject* construct(PyTypeObject*, PyObject* arguments, PyObject* options) {
    if (options != nullptr && PyDict_Size(options) > 0) {
        PyErr_Format(PyExc_TypeError, "%s() takes no keyword arguments", Instance<Class>::name);
        return nullptr;
    }
    std::vector<PyObject*> given(PyTuple_Size(arguments));
    for (size_t each = 0; each < given.size(); ++each) given[each] = PyTuple_GetItem(arguments, each);
    return call<make, Gil::kept>(Instance<Class>::name, given.data(), given.size());
}

template <class Class, auto function, Gil gil>
struct Method {
    static inline const char* name = nullptr;

    static PyObject* run(PyObject* self, PyObject* const* given, Py_ssize_t count) {
        return call<function, gil>(name, given, count, *Instance<Class>::of(self)->object);
    }
};

template <class Class, auto function, Gil gil>
PyMethodDef method(const char* name) {
    Method<Class, function, gil>::name = name;
    return row(name, &Method<Class, function, gil>::run);
}

template <class Class, auto function>
PyObject* attribute(PyObject* self, void*) {
    return guarded([&] { return to_python(std::invoke(function, *Instance<Class>::of(self)->object)); });
}

// Adds the class to a module. `name`: with those of the packages. `make` returns a shared pointer to a new object.
template <class Class, auto make>
void add_class(PyObject* module, const char* name, PyMethodDef* methods, PyGetSetDef* attributes) {
    PyType_Slot slots[] = {
        {Py_tp_new, reinterpret_cast<void*>(&construct<Class, make>)},
        {Py_tp_dealloc, reinterpret_cast<void*>(&Instance<Class>::destroy)},
        {Py_tp_methods, methods},
        {Py_tp_getset, attributes},
        {0, nullptr},
    };
    PyType_Spec spec{name, sizeof(Instance<Class>), 0, Py_TPFLAGS_DEFAULT, slots};
    Instance<Class>::name = std::strrchr(name, '.') + 1;
    Instance<Class>::type = reinterpret_cast<PyTypeObject*>(owned(PyType_FromSpec(&spec)).release());
    if (PyModule_AddType(module, Instance<Class>::type) < 0) throw ErrorIsSet{};
}

}  // namespace gradwire
