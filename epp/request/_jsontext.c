/* JSON strings to UTF-8 without the detour over str: the one part of the picker in C. epp/request/jsontext.py says why.
 *
 * It judges nothing: whatever is not plainly a well-formed string is answered with None, and the ordinary decoder decides.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <string.h>

typedef unsigned char byte;

#define EACH(b) (0x0101010101010101ULL * (b))

/* How many of the next 8 bytes, from the first on, are ASCII that stands for itself: no control character, quote or backslash. */
static inline int
count_plain(const byte *at)
{
    unsigned long long w, quote, slash, odd;
    memcpy(&w, at, 8);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    w = __builtin_bswap64(w);
#endif
    quote = w ^ EACH('"');
    slash = w ^ EACH('\\');
    /* The high bit of a byte tells: set in w itself, or by a borrow where the byte is under 0x20, a quote or a backslash.
     * A borrow may go on into later bytes, never into earlier ones, so that the first one told is right. */
    odd = (w | (w - EACH(0x20)) | (quote - EACH(1)) | (slash - EACH(1))) & EACH(0x80);
    return odd == 0 ? 8 : __builtin_ctzll(odd) / 8;
}

static inline int
continues(byte b)
{
    return (b & 0xC0) == 0x80;
}

/* Copies the UTF-8 sequence that begins with a byte over 0x7F. Its length; 0 where there is no valid one. */
static inline int
copy_sequence(const byte *at, const byte *end, byte *out)
{
    byte first = *at;
    if (first < 0xC2 || end - at < 2 || !continues(at[1]))
        return 0;
    out[0] = first;
    out[1] = at[1];
    if (first < 0xE0)
        return 2;
    if (end - at < 3 || !continues(at[2]))
        return 0;
    out[2] = at[2];
    if (first < 0xF0) /* Neither too long a form nor a surrogate. */
        return (first == 0xE0 && at[1] < 0xA0) || (first == 0xED && at[1] > 0x9F) ? 0 : 3;
    if (first > 0xF4 || end - at < 4 || !continues(at[3]))
        return 0;
    out[3] = at[3];
    return (first == 0xF0 && at[1] < 0x90) || (first == 0xF4 && at[1] > 0x8F) ? 0 : 4;
}

/* Four hexadecimal digits; -1 where there are none. */
static int
hex4(const byte *at, const byte *end)
{
    int value = 0;
    if (end - at < 4)
        return -1;
    for (int i = 0; i < 4; i++) {
        byte c = at[i];
        int digit = c >= '0' && c <= '9' ? c - '0' : (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 'a' + 10 : -1;
        if (digit < 0)
            return -1;
        value = value << 4 | digit;
    }
    return value;
}

/* What follows a backslash, as UTF-8; where it ends, or NULL. A half of a surrogate pair is left to the ordinary decoder. */
static const byte *
escape(const byte *at, const byte *end, byte **out)
{
    static const char names[] = "\"\\/bfnrt", means[] = "\"\\/\b\f\n\r\t";
    const char *known;
    int c;
    if (at == end)
        return NULL;
    if (*at && (known = strchr(names, *at)) != NULL) {
        *(*out)++ = (byte)means[known - names];
        return at + 1;
    }
    if (*at != 'u' || (c = hex4(at + 1, end)) < 0 || (c >= 0xD800 && c < 0xE000))
        return NULL;
    if (c < 0x80) {
        *(*out)++ = (byte)c;
    } else {
        if (c < 0x800) {
            *(*out)++ = (byte)(0xC0 | c >> 6);
        } else {
            *(*out)++ = (byte)(0xE0 | c >> 12);
            *(*out)++ = (byte)(0x80 | (c >> 6 & 0x3F));
        }
        *(*out)++ = (byte)(0x80 | (c & 0x3F));
    }
    return at + 5;
}

/* The bytes between the quotes, unescaped; where they end in `out`, or NULL. Never longer than what it reads. */
static byte *
unescape(const byte *at, const byte *end, byte *out)
{
    while (at < end) {
        while (end - at >= 8) {
            int n = count_plain(at);
            memcpy(out, at, 8); /* What is beyond n is written again; `out` has as much room as there is to read. */
            at += n;
            out += n;
            if (n < 8)
                break;
        }
        if (at == end)
            break;
        if (*at == '\\') {
            if ((at = escape(at + 1, end, &out)) == NULL)
                return NULL;
        } else if (*at < 0x20 || *at == '"') {
            return NULL;
        } else if (*at < 0x80) {
            *out++ = *at++;
        } else {
            do { /* Letters beyond ASCII come in rows. */
                int n = copy_sequence(at, end, out);
                if (n == 0)
                    return NULL;
                at += n;
                out += n;
            } while (at < end && *at > 0x7F);
        }
    }
    return out;
}

static PyObject *
text_of(PyObject *module, PyObject *json)
{
    Py_buffer view;
    if (PyObject_GetBuffer(json, &view, PyBUF_SIMPLE) < 0)
        return NULL;
    const byte *start = view.buf;
    PyObject *made = NULL;
    if (view.len >= 2 && start[0] == '"' && start[view.len - 1] == '"') {
        made = PyBytes_FromStringAndSize(NULL, view.len - 2);
        if (made == NULL) {
            PyBuffer_Release(&view);
            return NULL;
        }
        byte *first = (byte *)PyBytes_AS_STRING(made);
        byte *last = unescape(start + 1, start + view.len - 1, first);
        if (last == NULL)
            Py_CLEAR(made);
        else if (last - first != view.len - 2)
            _PyBytes_Resize(&made, last - first); /* NULL with an exception where it fails. */
    }
    PyBuffer_Release(&view);
    if (made == NULL && !PyErr_Occurred())
        Py_RETURN_NONE;
    return made;
}

static PyMethodDef methods[] = {
    {"text_of", text_of, METH_O, "The UTF-8 of a JSON string, quotes included; None where the ordinary decoder must judge."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_jsontext", "JSON strings to UTF-8.", 0, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC
PyInit__jsontext(void)
{
    return PyModuleDef_Init(&module);
}
