/* Reads JSON for the picker where Python would be too slow. epp/request/jsontext.py says why.
 *
 * It reports no error. For JSON that is not plainly well formed it returns None, and the ordinary decoder decides.
 */
#include "extension.h"

/* Returns how many of the next BLOCK bytes come before the first byte that is not plain ASCII. Control characters, quotes and
 * backslashes are not plain. */
#ifdef __SSE2__
#define BLOCK 16
static inline int
count_plain(const byte *at)
{
    __m128i v = _mm_loadu_si128((const __m128i *)at);
    /* As signed numbers, bytes over 0x7F are less than a space, too. */
    __m128i odd = _mm_or_si128(_mm_cmplt_epi8(v, _mm_set1_epi8(0x20)),
                               _mm_or_si128(_mm_cmpeq_epi8(v, _mm_set1_epi8('"')), _mm_cmpeq_epi8(v, _mm_set1_epi8('\\'))));
    int found = _mm_movemask_epi8(odd);
    return found == 0 ? BLOCK : __builtin_ctz((unsigned int)found);
}
#else
#define BLOCK 8
static inline int
count_plain(const byte *at)
{
    int n = 0;
    while (n < BLOCK && at[n] >= 0x20 && at[n] < 0x80 && at[n] != '"' && at[n] != '\\')
        n++;
    return n;
}
#endif

/* Returns the place of the next quote or backslash, or the end. */
static inline const byte *
find_special(const byte *at, const byte *end)
{
#ifdef __SSE2__
    const __m128i quote = _mm_set1_epi8('"'), slash = _mm_set1_epi8('\\');
    for (; end - at >= 16; at += 16) {
        __m128i v = _mm_loadu_si128((const __m128i *)at);
        int found = _mm_movemask_epi8(_mm_or_si128(_mm_cmpeq_epi8(v, quote), _mm_cmpeq_epi8(v, slash)));
        if (found)
            return at + __builtin_ctz((unsigned int)found);
    }
#endif
    while (at < end && *at != '"' && *at != '\\')
        at++;
    return at;
}

static inline const byte *
skip_spaces(const byte *at, const byte *end)
{
    while (at < end && (*at == ' ' || *at == '\n' || *at == '\r' || *at == '\t'))
        at++;
    return at;
}

static inline int
continues(byte b)
{
    return (b & 0xC0) == 0x80;
}

/* Copies the UTF-8 sequence that begins with a byte over 0x7F. Returns its length, or 0 if the sequence is not valid. */
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
    if (first < 0xF0) /* Refuse overlong forms and surrogates. */
        return (first == 0xE0 && at[1] < 0xA0) || (first == 0xED && at[1] > 0x9F) ? 0 : 3;
    if (first > 0xF4 || end - at < 4 || !continues(at[3]))
        return 0;
    out[3] = at[3];
    return (first == 0xF0 && at[1] < 0x90) || (first == 0xF4 && at[1] > 0x8F) ? 0 : 4;
}

/* Returns the value of four hexadecimal digits, or -1 if these are no such digits. */
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

static byte *
put_utf8(int c, byte *out)
{
    if (c < 0x80) {
        *out++ = (byte)c;
        return out;
    }
    if (c < 0x800) {
        *out++ = (byte)(0xC0 | c >> 6);
    } else if (c < 0x10000) {
        *out++ = (byte)(0xE0 | c >> 12);
        *out++ = (byte)(0x80 | (c >> 6 & 0x3F));
    } else {
        *out++ = (byte)(0xF0 | c >> 18);
        *out++ = (byte)(0x80 | (c >> 12 & 0x3F));
        *out++ = (byte)(0x80 | (c >> 6 & 0x3F));
    }
    *out++ = (byte)(0x80 | (c & 0x3F));
    return out;
}

/* Writes the escape after a backslash as UTF-8. Returns where the escape ends, or NULL if it is not valid, as half of a
 * surrogate pair is not. */
static const byte *
escape(const byte *at, const byte *end, byte **out)
{
    static const byte means[256] = {['"'] = '"', ['\\'] = '\\', ['/'] = '/', ['b'] = '\b', ['f'] = '\f', ['n'] = '\n', ['r'] = '\r', ['t'] = '\t'};
    int c;
    if (at == end)
        return NULL;
    if (means[*at]) {
        *(*out)++ = means[*at];
        return at + 1;
    }
    if (*at != 'u' || (c = hex4(at + 1, end)) < 0)
        return NULL;
    at += 5;
    if (c >= 0xD800 && c < 0xE000) {
        int low = c < 0xDC00 && end - at >= 2 && at[0] == '\\' && at[1] == 'u' ? hex4(at + 2, end) : -1;
        if (low < 0xDC00 || low >= 0xE000)
            return NULL;
        c = 0x10000 + ((c - 0xD800) << 10) + (low - 0xDC00);
        at += 6;
    }
    *out = put_utf8(c, *out);
    return at;
}

/* JSON that is read from `at` on, and the UTF-8 of its texts, which is written to `out`. The output is never longer than the
 * input. */
typedef struct {
    const byte *at, *end;
    byte *out;
    Py_ssize_t left; /* The messages, eightfold, and the escapes that may still come. */
} Text;

/* Unescapes up to the next quote, or to the end. Returns 0 if the text is not plainly well formed. */
static int
unescape(Text *text)
{
    const byte *at = text->at, *end = text->end;
    byte *out = text->out;
    while (at < end) {
        while (end - at >= BLOCK) {
            int n = count_plain(at);
            memcpy(out, at, BLOCK); /* The bytes after n are written again later; `out` has as much room as the input. */
            at += n;
            out += n;
            if (n < BLOCK)
                break;
        }
        if (at == end || *at == '"')
            break;
        if (*at == '\\') {
            if (text->left-- == 0 || (at = escape(at + 1, end, &out)) == NULL)
                return 0;
        } else if (*at < 0x20) {
            return 0;
        } else if (*at < 0x80) {
            *out++ = *at++;
        } else {
            do { /* A letter beyond ASCII is often followed by another one. */
                int n = copy_sequence(at, end, out);
                if (n == 0)
                    return 0;
                at += n;
                out += n;
            } while (at < end && *at > 0x7F);
        }
    }
    text->at = at;
    text->out = out;
    return 1;
}

static inline int
equals(const byte *text, Py_ssize_t n, const char *word)
{
    return n == (Py_ssize_t)strlen(word) && memcmp(text, word, (size_t)n) == 0;
}

/* Skips white space and the next sign if it is this one. Returns whether it was. */
static inline int
take(Text *json, byte sign)
{
    json->at = skip_spaces(json->at, json->end);
    if (json->at == json->end || *json->at != sign)
        return 0;
    json->at++;
    return 1;
}

/* Reads a string and appends it, unescaped, to the output. */
static int
take_text(Text *json)
{
    if (!take(json, '"') || !unescape(json) || json->at == json->end)
        return 0;
    json->at++;
    return 1;
}

/* Reads a string of ASCII without escapes. Returns its length, or -1. `start` becomes its beginning. */
static Py_ssize_t
take_plain(Text *json, const byte **start)
{
    if (!take(json, '"'))
        return -1;
    *start = json->at;
    while (json->at < json->end && *json->at >= 0x20 && *json->at < 0x80 && *json->at != '"' && *json->at != '\\')
        json->at++;
    return json->at < json->end && *json->at == '"' ? json->at++ - *start : -1;
}

static int
take_key(Text *json, const char *key)
{
    const byte *start;
    Py_ssize_t n = take_plain(json, &start);
    return n >= 0 && equals(start, n, key) && take(json, ':');
}

#define BILLING "x-anthropic-billing-header" /* canonical._BILLING */
#define BILLING_BYTES ((Py_ssize_t)sizeof(BILLING) - 1)

/* Reads one message: {"role": "...", "content": "..."} */
static int
take_message(Text *json)
{
    const byte *role;
    Py_ssize_t n;
    if ((json->left -= 8) < 0 || !take(json, '{') || !take_key(json, "role") || (n = take_plain(json, &role)) < 1)
        return 0;
    *json->out++ = 0xFF; /* canonical.SECTION */
    memcpy(json->out, role, (size_t)n);
    json->out += n;
    *json->out++ = 0xFE; /* canonical.BODY */
    if (!take(json, ',') || !take_key(json, "content"))
        return 0;
    const byte *text = json->out;
    if (!take_text(json))
        return 0;
    if (equals(role, n, "system") && json->out - text >= BILLING_BYTES && memcmp(text, BILLING, BILLING_BYTES) == 0)
        return 0;
    return take(json, '}');
}

/* Reads the messages of a chat, each of which has a plain role and a text, and nothing else. Nearly all chats are such. Their
 * prompt is written in one pass, without an object for each message. The ordinary decoder reads all other messages. */
static int
take_messages(Text *json)
{
    if (!take(json, '['))
        return 0;
    do {
        if (!take_message(json))
            return 0;
    } while (take(json, ','));
    return take(json, ']');
}

/* Returns what `read` writes of the JSON, or None. `*end` becomes the number of bytes that were read. */
static PyObject *
written(PyObject *json, int (*read)(Text *), Py_ssize_t most, Py_ssize_t *end)
{
    Py_buffer view;
    if (PyObject_GetBuffer(json, &view, PyBUF_SIMPLE) < 0)
        return NULL;
    PyObject *made = PyBytes_FromStringAndSize(NULL, view.len);
    if (made != NULL) {
        const byte *start = view.buf;
        byte *first = (byte *)PyBytes_AS_STRING(made);
        Text text = {.at = start, .end = start + view.len, .out = first, .left = most};
        int whole = read(&text) && (end != NULL || text.at == text.end);
        if (end != NULL)
            *end = text.at - start;
        if (whole)
            _PyBytes_Resize(&made, text.out - first); /* NULL with an exception where it fails. */
        else
            Py_SETREF(made, Py_NewRef(Py_None));
    }
    PyBuffer_Release(&view);
    return made;
}

static PyObject *
text_of(PyObject *Py_UNUSED(module), PyObject *json)
{
    return written(json, take_text, PY_SSIZE_T_MAX, NULL);
}

static PyObject *
plain_messages(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *json;
    Py_ssize_t most, end = 0;
    if (!PyArg_ParseTuple(args, "On", &json, &most))
        return NULL;
    PyObject *prompt = written(json, take_messages, most, &end);
    return prompt == NULL ? NULL : Py_BuildValue("Nn", prompt, end);
}

#define DEEPEST_RENDERED 8

/* Returns whether the value of this key of the body is read part by part. A key with escapes may be such a key. */
static int
is_read(const byte *key, Py_ssize_t n, int escaped)
{
    return escaped || equals(key, n, "messages") || equals(key, n, "input") || equals(key, n, "system") ||
           equals(key, n, "prompt");
}

/* Returns whether the value of this inner key stays as it was sent: a message's tool calls, the arguments of a part. */
static int
is_left(const byte *key, Py_ssize_t n, Py_ssize_t depth)
{
    return (depth == 3 && (equals(key, n, "tool_calls") || equals(key, n, "function_call"))) ||
           (depth == 5 && equals(key, n, "input"));
}

enum { MOST_NAMES = 4, MOST_KEY_BYTES = 256 }; /* A name that is looked for has at most 40 letters. */

/* A key of the body that is looked for, and where its value stands. */
typedef struct {
    const char *key;
    Py_ssize_t size, from, to;
} Place;

/* Counts the work that a body would cause, in one pass that reports no error (see epp/request/jsontext.py). */
typedef struct {
    Py_ssize_t units, containers, items, escapes; /* The counts. */
    Py_ssize_t between;                           /* Bytes outside strings: numbers, names, white space. */
    Place places[MOST_NAMES], *named;             /* The keys that are looked for; the last key, if it is such a key. */
    Py_ssize_t count;                             /* The number of places. */
    const byte *start, *opened;                   /* Where the body begins, and where its last inner container does. */
    Py_ssize_t depth, left_at;                    /* Open containers; the depth at which a value stays as it was sent, or 0. */
    int read;                                     /* About the body's last key. */
    char mixed[DEEPEST_RENDERED + 1];             /* Whether all items of the list at each depth become Python objects. */
} Weighing;

static inline int
is_counted(const Weighing *w)
{
    return w->read && !w->left_at && w->depth > 1 && w->depth <= DEEPEST_RENDERED;
}

/* Notes where the value of the body's last key is, if it is looked for. */
static void
note_value(Weighing *w, const byte *from, const byte *to)
{
    if (w->depth == 1 && w->named != NULL) {
        w->named->from = from - w->start;
        w->named->to = to - w->start;
    }
}

/* Returns the place for the value of this key of the body, which may have escapes. The key was looked for, or NULL. An earlier
 * value of the key does not count. */
static Place *
place_of(Weighing *w, const byte *key, const byte *end)
{
    byte plain[MOST_KEY_BYTES];
    Text text = {.at = key, .end = end, .out = plain, .left = MOST_KEY_BYTES};
    if (w->count == 0 || end - key > MOST_KEY_BYTES || !unescape(&text))
        return NULL;
    for (Place *p = w->places; p < w->places + w->count; p++)
        if (p->size == text.out - plain && memcmp(p->key, plain, (size_t)p->size) == 0) {
            p->from = p->to = 0;
            return p;
        }
    return NULL;
}

/* Returns where the next byte stands that is no space, or a space that is so far off that the counting ends before it. */
static inline const byte *
look_ahead(const byte *at, const byte *end, Py_ssize_t limit)
{
    return skip_spaces(at, (end - at) / 8 > limit ? at + 8 * limit : end);
}

/* Counts a string whose opening quote is at `at` - 1. Returns where the string ends. */
static const byte *
weigh_string(Weighing *w, const byte *at, const byte *end, Py_ssize_t limit)
{
    const byte *text = at;
    Py_ssize_t escapes_before = w->escapes;
    w->units++;
    for (;;) {
        at = find_special(at, end);
        if (at >= end || *at == '"')
            break;
        at += 2;
        if (++w->escapes + w->units > limit)
            break;
    }
    if (at > end)
        at = end;
    const byte *after = at < end ? at + 1 : end, *next = w->depth == 1 ? look_ahead(after, end, limit) : end;
    if (next < end && *next == ':') {
        w->read = is_read(text, at - text, w->escapes > escapes_before);
        w->named = place_of(w, text, at);
    } else if (at < end) {
        note_value(w, text - 1, after);
    }
    if (is_counted(w)) {
        w->items++;
        if (is_left(text, at - text, w->depth)) /* If this is no key, the comma or bracket behind it undoes it. */
            w->left_at = w->depth;
    }
    return after;
}

static inline void
weigh_open(Weighing *w, const byte *at, const byte *end, Py_ssize_t limit)
{
    w->units++;
    w->containers += is_counted(w);
    w->opened = w->depth == 1 ? at - 1 : w->opened;
    w->depth++;
    if (w->depth > 0 && w->depth <= DEEPEST_RENDERED) {
        const byte *first = look_ahead(at, end, limit);
        w->mixed[w->depth] = at[-1] == '[' && first < end && (*first == '"' || *first == '[' || *first == '{');
    }
}

static inline void
weigh_comma(Weighing *w, const byte *at)
{
    w->units++;
    if (w->depth == 1)
        w->named = NULL; /* A key at the end of a body that was cut is no value of the last key. */
    if (w->left_at == w->depth)
        w->left_at = 0;
    if (is_counted(w) && w->mixed[w->depth])
        w->items += at[-2] != '"' && at[-2] != ']' && at[-2] != '}'; /* The item before the comma is a number. */
}

static PyObject *
weigh(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *json, *names;
    Py_ssize_t limit;
    Py_buffer view;
    Weighing w = {0};
    if (!PyArg_ParseTuple(args, "OnO!", &json, &limit, &PyTuple_Type, &names))
        return NULL;
    for (; w.count < PyTuple_GET_SIZE(names) && w.count < MOST_NAMES; w.count++) {
        Place *place = &w.places[w.count];
        if ((place->key = PyUnicode_AsUTF8AndSize(PyTuple_GET_ITEM(names, w.count), &place->size)) == NULL)
            return NULL;
    }
    if (PyObject_GetBuffer(json, &view, PyBUF_SIMPLE) < 0)
        return NULL;
    const byte *at = w.start = view.buf, *end = at + view.len;
    while (at < end && w.units + w.escapes + w.between / 8 <= limit) {
        switch (*at++) {
        case '"':
            at = weigh_string(&w, at, end, limit);
            break;
        case '{':
        case '[':
            weigh_open(&w, at, end, limit);
            break;
        case '}':
        case ']':
            if (w.left_at == w.depth)
                w.left_at = 0;
            w.depth--;
            note_value(&w, w.opened, at);
            break;
        case ',':
            weigh_comma(&w, at);
            break;
        case ':':
            break;
        default:
            w.between++;
            break;
        }
    }
    if (at < end)
        w.units = limit + 1; /* Counting stopped early. */
    PyBuffer_Release(&view);
    PyObject *places = PyList_New(0);
    for (Place *p = w.places; places != NULL && p < w.places + w.count; p++) {
        PyObject *place = Py_BuildValue("nn", p->from, p->to);
        if (place == NULL || PyList_Append(places, place) < 0)
            Py_CLEAR(places);
        Py_XDECREF(place);
    }
    return places == NULL ? NULL : Py_BuildValue("(nnnn)N", w.units, w.containers, w.items, w.escapes, places);
}

static PyMethodDef methods[] = {
    {"text_of", text_of, METH_O, "Return the UTF-8 of a JSON string, quotes included. None: the ordinary decoder must read it."},
    {"plain_messages", plain_messages, METH_VARARGS,
     "Return the canonical prompt of a chat's messages, and their bytes. None: the ordinary decoder must read them."},
    {"weigh", weigh, METH_VARARGS, "Return the numbers of units, containers, items and escapes, and where the values of these keys begin and end."},
    {NULL, NULL, 0, NULL},
};

MODULE(_jsontext, "Reads JSON.")
