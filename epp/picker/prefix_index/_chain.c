/* Computes the chain of hashes of a prompt in one call. epp/picker/server_caches.py says which bytes are hashed.
 *
 * The hash is XXH3 with 64 bits and a seed, for inputs over 240 bytes, as its specification describes it. The package xxhash
 * returns the same values. It is used for shorter chunks.
 */
#include "extension.h"

typedef unsigned long long u64;

enum { STRIPE = 64, SECRET = 192, STRIPES_OF_BLOCK = (SECRET - STRIPE) / 8, BLOCK = STRIPE * STRIPES_OF_BLOCK, LANES = 8, SHORTEST = 241 };

static const u64 PRIME32_1 = 0x9E3779B1U, PRIME32_2 = 0x85EBCA77U, PRIME32_3 = 0xC2B2AE3DU;
static const u64 PRIME64_1 = 0x9E3779B185EBCA87ULL, PRIME64_2 = 0xC2B2AE3D27D4EB4FULL, PRIME64_3 = 0x165667B19E3779F9ULL,
                 PRIME64_4 = 0x85EBCA77C2B2AE63ULL, PRIME64_5 = 0x27D4EB2F165667C5ULL, PRIME_MX = 0x165667919E3779F9ULL;

/* The specification's default secret. */
static const byte DEFAULT_SECRET[SECRET] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb,
    0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb,
    0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3, 0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31,
    0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e, 0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc,
    0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static inline u64
read64(const byte *at)
{
    u64 value;
    memcpy(&value, at, 8);
    return value;
}

static inline void
write64(byte *at, u64 value)
{
    memcpy(at, &value, 8);
}

static void
seeded(byte *secret, u64 seed)
{
    for (int i = 0; i < SECRET; i += 16) {
        write64(secret + i, read64(DEFAULT_SECRET + i) + seed);
        write64(secret + i + 8, read64(DEFAULT_SECRET + i + 8) - seed);
    }
}

typedef u64 Lanes[LANES];

static inline void
accumulate(Lanes acc, const byte *data, const byte *secret)
{
#ifdef __SSE2__ /* The compiler does not find the multiplication of two halves by itself. */
    __m128i *pairs = (__m128i *)acc;
    for (int i = 0; i < LANES / 2; i++) {
        __m128i value = _mm_loadu_si128((const __m128i *)data + i);
        __m128i key = _mm_xor_si128(value, _mm_loadu_si128((const __m128i *)secret + i));
        __m128i product = _mm_mul_epu32(key, _mm_srli_epi64(key, 32)), sum = _mm_add_epi64(product, _mm_loadu_si128(pairs + i));
        _mm_storeu_si128(pairs + i, _mm_add_epi64(sum, _mm_shuffle_epi32(value, _MM_SHUFFLE(1, 0, 3, 2))));
    }
#else
    for (int i = 0; i < LANES; i++) {
        u64 value = read64(data + 8 * i), key = value ^ read64(secret + 8 * i);
        acc[i ^ 1] += value;
        acc[i] += (key & 0xFFFFFFFFULL) * (key >> 32);
    }
#endif
}

static inline void
scramble(Lanes acc, const byte *secret)
{
    for (int i = 0; i < LANES; i++)
        acc[i] = (acc[i] ^ (acc[i] >> 47) ^ read64(secret + 8 * i)) * PRIME32_1;
}

/* Returns the two halves of the product of 128 bits, combined by xor. */
static inline u64
fold(u64 a, u64 b)
{
    unsigned __int128 product = (unsigned __int128)a * b;
    return (u64)product ^ (u64)(product >> 64);
}

/* Returns the hash of `SHORTEST` bytes or more. */
static u64
hash(const byte *data, size_t size, u64 seed)
{
    byte secret[SECRET];
    Lanes acc = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    seeded(secret, seed);
    size_t blocks = (size - 1) / BLOCK, stripes = (size - 1) % BLOCK / STRIPE;
    const byte *at = data;
    for (size_t block = 0; block < blocks; block++) {
        for (int i = 0; i < STRIPES_OF_BLOCK; i++, at += STRIPE)
            accumulate(acc, at, secret + 8 * i);
        scramble(acc, secret + SECRET - STRIPE);
    }
    for (size_t i = 0; i < stripes; i++, at += STRIPE)
        accumulate(acc, at, secret + 8 * i);
    accumulate(acc, data + size - STRIPE, secret + SECRET - STRIPE - 7);
    u64 result = size * PRIME64_1;
    for (int i = 0; i < LANES; i += 2)
        result += fold(acc[i] ^ read64(secret + 11 + 8 * i), acc[i + 1] ^ read64(secret + 19 + 8 * i));
    result = (result ^ result >> 37) * PRIME_MX;
    return result ^ result >> 32;
}

static PyObject *
chain_of(PyObject *Py_UNUSED(self), PyObject *args)
{
    Py_buffer view;
    unsigned long long seed;
    Py_ssize_t size, count, later_size, later_count;
    if (!PyArg_ParseTuple(args, "y*Knnnn", &view, &seed, &size, &count, &later_size, &later_count))
        return NULL;
    PyObject *chain = NULL;
    if (size < SHORTEST || later_size < SHORTEST || count < 0 || later_count < 0 || count > view.len / size ||
        later_count > (view.len - count * size) / later_size) {
        PyErr_SetString(PyExc_ValueError, "the prompt has no such chunks");
    } else if ((chain = PyList_New(count + later_count)) != NULL) {
        const byte *at = view.buf;
        for (Py_ssize_t i = 0; i < count + later_count; i++) {
            Py_ssize_t each = i < count ? size : later_size;
            seed = hash(at, (size_t)each, seed);
            at += each;
            PyObject *number = PyLong_FromUnsignedLongLong(seed);
            if (number == NULL) {
                Py_CLEAR(chain);
                break;
            }
            PyList_SET_ITEM(chain, i, number);
        }
    }
    PyBuffer_Release(&view);
    return chain;
}

static PyMethodDef methods[] = {
    {"chain_of", chain_of, METH_VARARGS, "Return the hashes of `count` chunks of one size and then `later_count` of another. Each hash is the seed of the next."},
    {NULL, NULL, 0, NULL},
};

MODULE(_chain, "Hashes a prompt's chunks.")
