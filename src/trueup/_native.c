/* One pass over a matrix of logits, fused: maximum, normaliser, scores and class-wise tallies of a row while it is
 * in the cache. Arithmetic is in double whatever the input, so float32 logits give the answer of their exact values.
 * trueup/rows.py holds the same pass in torch: the reference, and what runs where this file was not compiled. */
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define BEST_CPU __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define BEST_CPU
#endif
#define INLINE static inline __attribute__((always_inline))

/* exp(x) for x <= 0, to one unit in the last place: range reduction by ln 2 and a Taylor polynomial of degree 13, written
 * without a branch so that the compiler vectorises the loops that call it. Below -708 it returns exp(-708), about 3e-308. */
INLINE double exp_nonpositive(double x) {
    const double round_to_int = 6755399441055744.0; /* 1.5 * 2^52: adding it leaves the integer in the low bits */
    x = x < -708.0 ? -708.0 : x;
    double shifted = x * 1.4426950408889634074 + round_to_int;
    double n = shifted - round_to_int;
    double r = x - n * 6.93147180369123816490e-01 - n * 1.90821492927058770002e-10;
    double p = 1.0 / 6227020800.0;
    p = p * r + 1.0 / 479001600.0;
    p = p * r + 1.0 / 39916800.0;
    p = p * r + 1.0 / 3628800.0;
    p = p * r + 1.0 / 362880.0;
    p = p * r + 1.0 / 40320.0;
    p = p * r + 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    p = p * r + 1.0;
    p = p * r + 1.0;
    uint64_t bits;
    memcpy(&bits, &shifted, 8);
    bits = (bits + 1023) << 52;
    double power_of_two;
    memcpy(&power_of_two, &bits, 8);
    return p * power_of_two;
}

/* The hash of `hashed_groups` in rows.py, bit for bit. */
INLINE uint64_t hash_bits(uint64_t first, uint64_t label, uint64_t last, uint64_t y) {
    uint64_t h = y * 0x165667B19E3779F9ull;
    h = (h + first) * 0x9E3779B97F4A7C15ull;
    h ^= h >> 29;
    h = (h + label) * 0xC2B2AE3D27D4EB4Full;
    h ^= h >> 29;
    h = (h + last) * 0x27D4EB2F165667C5ull;
    return h ^ (h >> 29);
}

INLINE uint64_t hash_float(float first, float label, float last, int64_t y) {
    int32_t f, l, t;
    memcpy(&f, &first, 4);
    memcpy(&l, &label, 4);
    memcpy(&t, &last, 4);
    return hash_bits((uint64_t)(int64_t)f, (uint64_t)(int64_t)l, (uint64_t)(int64_t)t, (uint64_t)y);
}

INLINE uint64_t hash_double(double first, double label, double last, int64_t y) {
    uint64_t f, l, t;
    memcpy(&f, &first, 8);
    memcpy(&l, &label, 8);
    memcpy(&t, &last, 8);
    return hash_bits(f, l, t, (uint64_t)y);
}

/* A row is worked on in whole vectors: its tail is filled with a shift whose exponential is 3e-308, which adds nothing. */
enum { LANES = 8 };
#define NOTHING -708.0

typedef struct {
    int64_t rows, classes, bins, groups;
    int deal;                                                 /* deal the rows to groups, or take group as it comes */
    const int64_t *labels;                                    /* NULL: confidence and predicted only */
    double *confidence, *nll, *brier, *entropy, *label_prob;  /* a number a row */
    int64_t *predicted;
    const double *cuts;                                       /* bins - 1; p lies in bin #{cuts < p} */
    int64_t *group;                                           /* which part of gap a row adds to */
    double *count, *hits;                                     /* (bins, classes); bin 0 of count is left to the caller */
    double *gap;                                              /* (groups, bins, classes): sum of hits - p; NULL: no class-wise tally */
    double *scratch;                                          /* classes + LANES numbers */
} Pass;

#define DEFINE_PASS(NAME, REAL, HASH)                                                                                     \
    BEST_CPU static void NAME(const REAL *logits, const Pass *p) {                                                        \
        const int64_t K = p->classes, B = p->bins;                                                                        \
        double *e = p->scratch;                                                                                           \
        const int64_t padded = (K + LANES - 1) / LANES * LANES;                                                           \
        for (int64_t k = K; k < padded; k++) e[k] = NOTHING;                                                              \
        for (int64_t i = 0; i < p->rows; i++) {                                                                           \
            const REAL *z = logits + i * K;                                                                               \
            REAL top = z[0];                                                                                              \
            _Pragma("omp simd reduction(max : top)")                                                                      \
            for (int64_t k = 1; k < K; k++) top = z[k] > top ? z[k] : top;                                                \
            int64_t best = 0;                                                                                             \
            while (z[best] != top) best++;                                                                                \
            p->predicted[i] = best;                                                                                       \
            const double m = (double)top;                                                                                 \
            double sum = 0.0, dot = 0.0, square = 0.0;                                                                    \
            for (int64_t k = 0; k < K; k++) e[k] = (double)z[k] - m;                                                      \
            if (!p->labels) {                                                                                             \
                _Pragma("omp simd reduction(+ : sum)")                                                                    \
                for (int64_t k = 0; k < padded; k++) sum += exp_nonpositive(e[k]);                                        \
                p->confidence[i] = 1.0 / sum;                                                                             \
                continue;                                                                                                 \
            }                                                                                                             \
            _Pragma("omp simd reduction(+ : sum, dot, square)")                                                           \
            for (int64_t k = 0; k < padded; k++) {                                                                        \
                double d = e[k], x = exp_nonpositive(d);                                                                  \
                e[k] = x;                                                                                                 \
                sum += x;                                                                                                 \
                dot += x * d;                                                                                             \
                square += x * x;                                                                                          \
            }                                                                                                             \
            for (int64_t k = K; k < padded; k++) e[k] = NOTHING;                                                          \
            const int64_t y = p->labels[i];                                                                               \
            const double scale = 1.0 / sum, log_sum = log(sum), label_prob = e[y] * scale;                                \
            p->confidence[i] = scale;                                                                                     \
            p->nll[i] = log_sum - ((double)z[y] - m);                                                                     \
            p->brier[i] = square * scale * scale - 2.0 * label_prob + 1.0;                                                \
            p->entropy[i] = log_sum - dot * scale;                                                                        \
            p->label_prob[i] = label_prob;                                                                                \
            if (!p->gap) continue;                                                                                        \
            if (p->deal) p->group[i] = (int64_t)(HASH(z[0], z[y], z[K - 1], y) % (uint64_t)p->groups);                    \
            double *gap = p->gap + p->group[i] * B * K;                                                                   \
            _Pragma("omp simd")                                                                                           \
            for (int64_t k = 0; k < K; k++) gap[k] -= e[k] * scale;                                                       \
            int64_t label_bin = 0;                                                                                        \
            if (B > 1 && scale > p->cuts[0]) {                                                                            \
                /* Fewer than 1/cut probabilities of a row can exceed a cut: look for them a block at a time. */          \
                const double threshold = p->cuts[0] * sum * (1.0 - 1e-12);                                                \
                for (int64_t from = 0; from < K; from += 64) {                                                            \
                    const int64_t to = from + 64 < K ? from + 64 : K;                                                     \
                    double block = 0.0;                                                                                   \
                    _Pragma("omp simd reduction(max : block)")                                                            \
                    for (int64_t k = from; k < to; k++) block = e[k] > block ? e[k] : block;                              \
                    if (block <= threshold) continue;                                                                     \
                    for (int64_t k = from; k < to; k++) {                                                                 \
                        if (e[k] <= threshold) continue;                                                                  \
                        const double prob = e[k] * scale;                                                                 \
                        int64_t b = 0;                                                                                    \
                        while (b < B - 1 && prob > p->cuts[b]) b++;                                                       \
                        if (b == 0) continue;                                                                             \
                        if (k == y) label_bin = b;                                                                        \
                        p->count[b * K + k] += 1.0;                                                                       \
                        gap[k] += prob;                                                                                   \
                        gap[b * K + k] -= prob;                                                                           \
                    }                                                                                                     \
                }                                                                                                         \
            }                                                                                                             \
            p->hits[label_bin * K + y] += 1.0;                                                                            \
            gap[label_bin * K + y] += 1.0;                                                                                \
        }                                                                                                                 \
    }

DEFINE_PASS(pass_float, float, hash_float)
DEFINE_PASS(pass_double, double, hash_double)

/* Addresses come as integers (Tensor.data_ptr()); rows.py owns the memory, checks it and keeps it alive. */
static PyObject *run_pass(PyObject *self, PyObject *args) {
    (void)self;
    unsigned long long a[13];
    long long rows, classes, bins, groups;
    int is_double, deal;
    if (!PyArg_ParseTuple(args, "KpLLLLpKKKKKKKKKKKK", &a[0], &is_double, &rows, &classes, &bins, &groups, &deal, &a[1], &a[2],
                          &a[3], &a[4], &a[5], &a[6], &a[7], &a[8], &a[9], &a[10], &a[11], &a[12]))
        return NULL;
#define AT(I, TYPE) ((TYPE *)(uintptr_t)a[I])
    Pass p = {.rows = rows,
              .classes = classes,
              .bins = bins,
              .groups = groups,
              .deal = deal,
              .labels = AT(1, const int64_t),
              .confidence = AT(2, double),
              .predicted = AT(3, int64_t),
              .nll = AT(4, double),
              .brier = AT(5, double),
              .entropy = AT(6, double),
              .label_prob = AT(7, double),
              .cuts = AT(8, const double),
              .group = AT(9, int64_t),
              .count = AT(10, double),
              .hits = AT(11, double),
              .gap = AT(12, double)};
#undef AT
    p.scratch = malloc(((size_t)classes + LANES) * sizeof(double));
    if (!p.scratch) return PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS
    if (is_double)
        pass_double((const double *)(uintptr_t)a[0], &p);
    else
        pass_float((const float *)(uintptr_t)a[0], &p);
    free(p.scratch);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {{"run_pass", run_pass, METH_VARARGS, "Fused pass over rows of logits; see rows.py."},
                                {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", NULL, -1, methods, NULL, NULL, NULL, NULL};
PyMODINIT_FUNC PyInit__native(void) { return PyModule_Create(&module); }
