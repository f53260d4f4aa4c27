/* Cuts ext_proc's messages out of protobuf's wire format, and writes the answer to each piece of a body.
 * epp/protocol/codec.py gives the reasons.
 *
 * If a message is not exactly as data planes send it, the result is None, and protobuf decodes the message.
 */
#include "extension.h"

/* Wire tags: field number times eight plus the wire type. */
enum { RESPONSE_BODY = 0x2A };
enum { REQUEST_SLOT = 0x1A, RESPONSE_SLOT = 0x22, COMMON_RESPONSE = 0x0A, BODY_MUTATION = 0x1A, STREAMED_RESPONSE = 0x1A };
enum { FIRST = 0x0A, RAW_VALUE = 0x1A, HEADERS_END = 0x18, BODY_END = 0x10, LAST_BODY_FLAG = 0x20 };
/* The bytes in front of a gRPC message: whether it is compressed, and its length. */
enum { GRPC_HEAD = 5 };
enum { MOST_HEADERS = 4096 }; /* codec.MOST_HEADERS */

/* Bytes of a message: the next byte, and the end of the bytes. */
typedef struct {
    const byte *at, *end;
} Span;

static inline Py_ssize_t
left(const Span *span)
{
    return span->end - span->at;
}

/* Takes a length, and as many bytes, out of the span. Returns 0 if the bytes are not there. */
static inline int
take_sized(Span *from, Span *taken)
{
    unsigned long long size = 0;
    const byte *at = from->at;
    for (int shift = 0; shift < 35; shift += 7) {
        if (at >= from->end)
            return 0;
        size |= (unsigned long long)(*at & 0x7F) << shift;
        if (*at++ < 0x80) {
            if (size > (unsigned long long)(from->end - at))
                return 0;
            taken->at = at;
            taken->end = from->at = at + size;
            return 1;
        }
    }
    return 0;
}

/* Takes a field with this tag, as `take_sized` does. */
static inline int
take_field(Span *from, byte tag, Span *taken)
{
    return from->at < from->end && *from->at++ == tag && take_sized(from, taken);
}

/* Returns the end-of-stream flag. Only flags may be left, whose tags begin with this one: -1 if there is something
 * else. */
static inline int
flag_of(const Span *rest, byte tag, byte last_tag)
{
    int ends = 0;
    const byte *at = rest->at;
    for (; rest->end - at >= 2 && at[0] >= tag && at[0] <= last_tag && at[0] % 8 == 0 && at[1] <= 1; at += 2)
        if (at[0] == tag)
            ends = at[1];
    return at == rest->end ? ends : -1;
}

/* Returns the index of the name, or -1 if it is not wanted. -2: protobuf must look, because the name has letters that
 * can mean a wanted name. */
static Py_ssize_t
find_name(PyObject *names, const Span *name)
{
    Py_ssize_t size = left(name), count = PyTuple_GET_SIZE(names);
    for (const byte *at = name->at; at < name->end; at++)
        if (*at >= 0x80 || (*at >= 'A' && *at <= 'Z'))
            return -2;
    for (Py_ssize_t n = 0; n < count; n++) {
        PyObject *wanted = PyTuple_GET_ITEM(names, n);
        if (PyUnicode_GET_LENGTH(wanted) == size && memcmp(PyUnicode_DATA(wanted), name->at, (size_t)size) == 0)
            return n;
    }
    return -1;
}

static int
append_header(PyObject *found, PyObject *name, const Span *value)
{
    PyObject *text = PyUnicode_DecodeLatin1((const char *)value->at, left(value), NULL);
    PyObject *header = text == NULL ? NULL : PyTuple_Pack(2, name, text);
    int failed = header == NULL || PyList_Append(found, header) < 0;
    Py_XDECREF(text);
    Py_XDECREF(header);
    return failed ? -1 : 0;
}

/* Reads every header of the map. Returns 1, or 0 if protobuf must read them, or -1 if an exception is set. */
static int
read_map(Span map, PyObject *names, PyObject *found)
{
    for (int count = 0; map.at < map.end; count++) {
        Span header, name, value;
        if (count == MOST_HEADERS || !take_field(&map, FIRST, &header) || !take_field(&header, FIRST, &name))
            return 0;
        value.at = value.end = header.end;
        if (header.at < header.end && (!take_field(&header, RAW_VALUE, &value) || header.at != header.end))
            return 0;
        Py_ssize_t n = find_name(names, &name);
        if (n == -2)
            return 0;
        if (n >= 0 && append_header(found, PyTuple_GET_ITEM(names, n), &value) < 0)
            return -1;
    }
    return 1;
}

/* Finds the headers or the body in a message whose first field holds them. Behind them only flags may stand, whose tags
 * are from `tag`, that of the end of the stream, to `last_tag`. Returns this flag, or -1 if the field is not as data
 * planes send it. `rest` becomes the bytes behind this field. */
static int
find_part(Span *rest, Span *found, byte tag, byte last_tag)
{
    Span part;
    if (rest->at == rest->end)
        return -1;
    rest->at++;
    if (!take_sized(rest, &part) || !take_field(&part, FIRST, found))
        return -1;
    return flag_of(&part, tag, last_tag);
}

static PyObject *
headers_in(const byte *start, Py_ssize_t size, PyObject *names)
{
    Span rest = {start, start + size}, map;
    int ends = find_part(&rest, &map, HEADERS_END, HEADERS_END);
    if (ends < 0)
        Py_RETURN_NONE;
    PyObject *found = PyList_New(0);
    if (found == NULL)
        return NULL;
    int read = read_map(map, names, found);
    if (read > 0)
        return Py_BuildValue("NOn", found, ends ? Py_True : Py_False, (Py_ssize_t)(rest.at - start));
    Py_DECREF(found);
    if (read < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *
headers_of(PyObject *Py_UNUSED(self), PyObject *args)
{
    Py_buffer view;
    PyObject *names, *found;
    if (!PyArg_ParseTuple(args, "y*O!", &view, &PyTuple_Type, &names))
        return NULL;
    for (Py_ssize_t n = 0; n < PyTuple_GET_SIZE(names); n++) {
        PyObject *name = PyTuple_GET_ITEM(names, n);
        if (!PyUnicode_Check(name) || PyUnicode_READY(name) < 0 || !PyUnicode_IS_ASCII(name)) {
            PyBuffer_Release(&view);
            PyErr_SetString(PyExc_TypeError, "names are ASCII");
            return NULL;
        }
    }
    found = headers_in(view.buf, view.len, names);
    PyBuffer_Release(&view);
    return found;
}

static PyObject *
body_of(PyObject *Py_UNUSED(self), PyObject *data)
{
    Py_buffer view;
    if (PyObject_GetBuffer(data, &view, PyBUF_SIMPLE) < 0)
        return NULL;
    const byte *start = view.buf;
    Span rest = {start, start + view.len}, body;
    int ends = find_part(&rest, &body, BODY_END, LAST_BODY_FLAG);
    PyBuffer_Release(&view);
    if (ends < 0)
        Py_RETURN_NONE;
    return Py_BuildValue("nnOn", (Py_ssize_t)(body.at - start), (Py_ssize_t)(body.end - start), ends ? Py_True : Py_False,
                         (Py_ssize_t)(rest.at - start));
}

/* Returns the length of a field with so many bytes. */
static inline size_t
field_bytes(size_t size)
{
    size_t whole = 2 + size;
    for (; size > 0x7F; size >>= 7)
        whole++;
    return whole;
}

static inline byte *
put_head(byte *out, byte tag, size_t size)
{
    *out++ = tag;
    for (; size > 0x7F; size >>= 7)
        *out++ = (byte)((size & 0x7F) | 0x80);
    *out++ = (byte)size;
    return out;
}

/* The lengths in the answer that lets a body go on unchanged:
 * response > body_mutation > streamed_response > body. */
typedef struct {
    size_t streamed, mutation, common, part, whole;
} Sizes;

static Sizes
echo_sizes(size_t size, int ends)
{
    Sizes of;
    of.streamed = (size ? field_bytes(size) : 0) + (ends ? 2 : 0);
    of.mutation = field_bytes(of.streamed);
    of.common = field_bytes(of.mutation);
    of.part = field_bytes(of.common);
    of.whole = field_bytes(of.part);
    return of;
}

static byte *
put_echo(byte *out, byte slot, Sizes of, const byte *data, size_t size, int ends)
{
    out = put_head(out, slot, of.part);
    out = put_head(out, COMMON_RESPONSE, of.common);
    out = put_head(out, BODY_MUTATION, of.mutation);
    out = put_head(out, STREAMED_RESPONSE, of.streamed);
    if (size) {
        out = put_head(out, FIRST, size);
        memcpy(out, data, size);
        out += size;
    }
    if (ends) {
        *out++ = BODY_END;
        *out++ = 1;
    }
    return out;
}

static PyObject *
echo(PyObject *Py_UNUSED(self), PyObject *args)
{
    Py_buffer view;
    int is_response, ends;
    if (!PyArg_ParseTuple(args, "py*p", &is_response, &view, &ends))
        return NULL;
    Sizes of = echo_sizes((size_t)view.len, ends);
    PyObject *made = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)of.whole);
    if (made != NULL)
        put_echo((byte *)PyBytes_AS_STRING(made), is_response ? RESPONSE_SLOT : REQUEST_SLOT, of, view.buf,
                 (size_t)view.len, ends);
    PyBuffer_Release(&view);
    return made;
}

/* Takes the next gRPC message of a frame if it is a piece of a response's body, but not the last piece. Returns 0 if it is
 * something else, or not whole. */
static int
next_piece(Span *frame, Span *body, Py_ssize_t most)
{
    const byte *at = frame->at;
    if (left(frame) < GRPC_HEAD || at[0] != 0)
        return 0;
    size_t size = (size_t)at[1] << 24 | (size_t)at[2] << 16 | (size_t)at[3] << 8 | at[4];
    if (size > (size_t)left(frame) - GRPC_HEAD)
        return 0;
    Span message = {at + GRPC_HEAD, at + GRPC_HEAD + size};
    frame->at = message.end;
    return size > 0 && *message.at == RESPONSE_BODY && find_part(&message, body, BODY_END, LAST_BODY_FLAG) == 0 &&
           left(body) <= most && message.at == message.end;
}

static PyObject *
echoes_in(PyObject *Py_UNUSED(self), PyObject *const *args, Py_ssize_t count)
{
    if (count != 4 || !PyBytes_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "most bytes of a piece, bytes, and two places in them");
        return NULL;
    }
    Py_ssize_t most = PyLong_AsSsize_t(args[0]), from = PyLong_AsSsize_t(args[2]), to = PyLong_AsSsize_t(args[3]);
    if (PyErr_Occurred())
        return NULL;
    if (from < 0 || from >= to || to > PyBytes_GET_SIZE(args[1]))
        Py_RETURN_NONE;
    const byte *start = (const byte *)PyBytes_AS_STRING(args[1]);
    Span frame = {start + from, start + to}, body;
    size_t whole = 0;
    while (frame.at < frame.end) {
        if (!next_piece(&frame, &body, most))
            Py_RETURN_NONE;
        whole += GRPC_HEAD + echo_sizes((size_t)left(&body), 0).whole;
    }
    PyObject *made = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)whole);
    if (made == NULL)
        return NULL;
    byte *out = (byte *)PyBytes_AS_STRING(made);
    for (frame.at = start + from; frame.at < frame.end && next_piece(&frame, &body, most);) {
        Sizes of = echo_sizes((size_t)left(&body), 0);
        *out++ = 0;
        for (int shift = 24; shift >= 0; shift -= 8)
            *out++ = (byte)(of.whole >> shift);
        out = put_echo(out, RESPONSE_SLOT, of, body.at, (size_t)left(&body), 0);
    }
    return made;
}

static PyMethodDef methods[] = {
    {"headers_of", headers_of, METH_VARARGS, "Return the wanted headers of a message, whether the stream ends, and where the rest begins."},
    {"body_of", body_of, METH_O, "Return where the body of a message begins and ends, whether the stream ends, and where the rest begins."},
    {"echo", echo, METH_VARARGS, "The answer by which a body goes on as it came."},
    {"echoes_in", (PyCFunction)(void (*)(void))echoes_in, METH_FASTCALL, "Return the echoes of all gRPC messages of a DATA frame, with gRPC's heads. None: some message wants another answer."},
    {NULL, NULL, 0, NULL},
};

MODULE(_wire, "Cuts ext_proc's messages out of protobuf's wire format.")
