/* The common parts of the picker's modules in C. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "epp runs on little-endian machines only"
#endif

typedef unsigned char byte;

/* Defines the module of this name, which has the functions of `methods`. */
#define MODULE(name, text)                                                                         \
    static struct PyModuleDef module = {                                                           \
        PyModuleDef_HEAD_INIT, #name, text, 0, methods, NULL, NULL, NULL, NULL,                    \
    };                                                                                             \
    PyMODINIT_FUNC PyInit_##name(void)                                                             \
    {                                                                                              \
        return PyModuleDef_Init(&module);                                                          \
    }
