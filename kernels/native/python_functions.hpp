// C++ functions as Python calls them, on the limited API: what is built once serves every Python from 3.10 on.
//
// `method<function, gil>("name")` is a row of a table of methods; the conversions follow from the function's types. An
// argument is converted by the overload of `convert` for its type, and a result by that of `to_python`.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cerrno>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace gradwire {

enum class Gil { kept, released };

class WithoutGil {
public:
    WithoutGil() : state_(PyEval_SaveThread()) {}
    ~WithoutGil() noexcept(false) { PyEval_RestoreThread(state_); }  // which may end a thread when Python ends
    WithoutGil(const WithoutGil&) = delete;
    WithoutGil& operator=(const WithoutGil&) = delete;

private:
    PyThreadState* state_;
};
struct WithGil {};

struct GiveBack {
    void operator()(PyObject* object) const { Py_DECREF(object); }
};
using Object = std::unique_ptr<PyObject, GiveBack>;  // a reference of our own

// Thrown where Python has been told of an error already.
struct ErrorIsSet {};

// Thrown where an argument is not what it has to be.
struct Unexpected {
    const char* expected;
};

inline Object owned(PyObject* found) {
    if (found == nullptr) throw ErrorIsSet{};
    return Object(found);
}

// Of an argument that could not be converted: what it has to be, or an error that has nothing to do with its type.
[[noreturn]] inline void refuse(const char* expected) {
    if (PyErr_Occurred()) {
        const auto is = [](PyObject* kind) { return PyErr_ExceptionMatches(kind) != 0; };
        if (!is(PyExc_TypeError) && !is(PyExc_OverflowError) && !is(PyExc_AttributeError)) throw ErrorIsSet{};
    }
    throw Unexpected{expected};
}

inline void convert(PyObject* given, int64_t& value) {
    value = PyLong_AsLongLong(given);
    if (value == -1 && PyErr_Occurred()) refuse("an integer of 64 bits");
}

inline void convert(PyObject* given, int& value) {
    const int64_t wide = PyLong_AsLongLong(given);
    value = static_cast<int>(wide);
    if ((wide == -1 && PyErr_Occurred()) || value != wide) refuse("an integer of 32 bits");
}

inline void convert(PyObject* given, size_t& value) {
    value = PyLong_AsSize_t(given);
    if (value == static_cast<size_t>(-1) && PyErr_Occurred()) refuse("an integer from 0 on");
}

inline void convert(PyObject* given, double& value) {
    value = PyFloat_AsDouble(given);
    if (value == -1 && PyErr_Occurred()) refuse("a number");
}

inline void convert(PyObject* given, bool& value) {
    value = given == Py_True;
    if (!value && given != Py_False) refuse("True or False");
}

inline void convert(PyObject* given, std::string& value) {
    const char* text = PyUnicode_Check(given) ? PyUnicode_AsUTF8AndSize(given, nullptr) : nullptr;
    if (text == nullptr) refuse("a str");
    value = text;
}

inline void convert(PyObject* given, Object& value) {
    Py_INCREF(given);
    value.reset(given);
}

template <class Element>
void convert(PyObject* given, std::vector<Element>& values) {
    const Py_ssize_t size = PySequence_Check(given) ? PySequence_Size(given) : -1;
    if (size < 0) refuse("a sequence");
    values.resize(size);
    for (Py_ssize_t each = 0; each < size; ++each) convert(owned(PySequence_GetItem(given, each)).get(), values[each]);
}

inline PyObject* to_python(PyObject* value) { return value; }
inline PyObject* to_python(bool value) { return PyBool_FromLong(value); }
inline PyObject* to_python(int value) { return PyLong_FromLong(value); }
inline PyObject* to_python(int64_t value) { return PyLong_FromLongLong(value); }
inline PyObject* to_python(size_t value) { return PyLong_FromSize_t(value); }
inline PyObject* to_python(double value) { return PyFloat_FromDouble(value); }
inline PyObject* to_python(const char* value) { return PyUnicode_FromString(value); }

template <class Element>
PyObject* to_python(const std::vector<Element>& values) {
    Object list = owned(PyList_New(values.size()));
    for (size_t each = 0; each < values.size(); ++each) {
        PyList_SetItem(list.get(), each, owned(to_python(values[each])).release());
    }
    return list.release();
}

// What a function takes, or a method beside its object.
template <class Result, class... Types>
std::tuple<std::decay_t<Types>...> taken(Result (*)(Types...));
template <class Result, class Class, class... Types>
std::tuple<std::decay_t<Types>...> taken(Result (Class::*)(Types...));
template <class Result, class Class, class... Types>
std::tuple<std::decay_t<Types>...> taken(Result (Class::*)(Types...) const);

// Python's exception for the one in flight.
inline void tell_python() {
    try {
        throw;
    } catch (const ErrorIsSet&) {
    } catch (const std::bad_alloc&) {
        PyErr_NoMemory();
    } catch (const std::out_of_range& error) {
        PyErr_SetString(PyExc_IndexError, error.what());
    } catch (const std::invalid_argument& error) {
        PyErr_SetString(PyExc_ValueError, error.what());
    } catch (const std::system_error& error) {
        errno = error.code().value();
        PyErr_SetFromErrno(PyExc_OSError);
    } catch (const std::exception& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
    }
}

// What `work` returns, or null and Python's exception for what it throws.
template <class Work>
PyObject* guarded(const Work& work) {
    try {
        return work();
    } catch (...) {
        tell_python();
        return nullptr;
    }
}

// `Arguments`: a tuple of their types.
template <class Arguments, size_t... places>
Arguments converted(const char* name, PyObject* const* given, size_t count, std::index_sequence<places...>) {
    if (count != sizeof...(places)) {
        PyErr_Format(PyExc_TypeError, "%s() takes %zu arguments, %zu were given", name, sizeof...(places), count);
        throw ErrorIsSet{};
    }
    Arguments arguments;
    size_t place = 0;
    try {
        ((place = places, convert(given[places], std::get<places>(arguments))), ...);
    } catch (const Unexpected& wrong) {
        PyErr_Clear();
        PyErr_Format(PyExc_TypeError, "argument %zu of %s() has to be %s, got %.80R", place + 1, name, wrong.expected,
                     given[place]);
        throw ErrorIsSet{};
    }
    return arguments;
}

// What Python calls. `self`: of a method, its object.
template <auto function, Gil gil, class... Self>
PyObject* call(const char* name, PyObject* const* given, size_t count, Self&... self) {
    using Arguments = decltype(taken(function));
    constexpr auto places = std::make_index_sequence<std::tuple_size_v<Arguments>>{};
    return guarded([&]() -> PyObject* {
        auto arguments = converted<Arguments>(name, given, count, places);
        const auto work = [&] {
            [[maybe_unused]] const std::conditional_t<gil == Gil::released, WithoutGil, WithGil> state{};
            const auto apart = [&](auto&... each) { return std::invoke(function, self..., std::move(each)...); };
            return std::apply(apart, arguments);
        };
        if constexpr (std::is_void_v<decltype(work())>) {
            work();
            Py_RETURN_NONE;
        } else {
            return to_python(work());
        }
    });
}

template <auto function, Gil gil>
struct Function {
    static inline const char* name = nullptr;

    static PyObject* run(PyObject*, PyObject* const* given, Py_ssize_t count) {
        return call<function, gil>(name, given, count);
    }
};

using FastCall = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);

inline PyMethodDef row(const char* name, FastCall function, int flags = 0) {
    const auto erased = reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
    return {name, erased, METH_FASTCALL | flags, nullptr};
}

template <auto function, Gil gil>
PyMethodDef method(const char* name, int flags = 0) {
    Function<function, gil>::name = name;
    return row(name, &Function<function, gil>::run, flags);
}

}  // namespace gradwire
