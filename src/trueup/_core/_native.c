/* One pass over a matrix of logits, fused: maximum, normaliser, scores and class-wise tallies of a row while it is
 * in the cache. Arithmetic is in double whatever the input, so float32 logits give the answer of their exact values;
 * only the quick confidence pass, which is all that an ECE costs, works on float in float.
 * A logit of -inf is an option that its row does not have: its probability is 3e-308, and it adds nothing.
 * row_scores.py and loss_sums.py hold the same passes in NumPy: the reference, and what runs where this was not
 * compiled. */
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

/* exp(x) for x <= 0, to one unit in the last place: range reduction by ln 2 and 1 + r + r^2 q(r), where q, of degree 9,
 * interpolates at Chebyshev nodes (relative error 2e-17); written without a branch so that the compiler vectorises the
 * loops that call it. Below -708 it returns exp(-708), about 3e-308. */
INLINE double exp_nonpositive(double x) {
    const double round_to_int = 6755399441055744.0; /* 1.5 * 2^52: adding it leaves the integer in the low bits */
    x = x < -708.0 ? -708.0 : x;
    double shifted = x * 1.4426950408889634074 + round_to_int;
    double n = shifted - round_to_int;
    double r = x - n * 6.93147180369123816490e-01 - n * 1.90821492927058770002e-10;
    double p = 2.5100424157005067e-08;
    p = p * r + 2.7620138719733994e-07;
    p = p * r + 2.7557268378684192e-06;
    p = p * r + 2.480152119021773e-05;
    p = p * r + 0.00019841269863105968;
    p = p * r + 0.0013888888917281794;
    p = p * r + 0.008333333333330051;
    p = p * r + 0.04166666666662399;
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

/* The same in float, to two units in its last place; below -87 it returns about 2e-38. */
INLINE float expf_nonpositive(float x) {
    const float round_to_int = 12582912.0f; /* 1.5 * 2^23 */
    x = x < -87.0f ? -87.0f : x;
    float shifted = x * 1.44269504f + round_to_int;
    float n = shifted - round_to_int;
    float r = x - n * 0.693145752f - n * 1.42860677e-6f;
    float p = 0.0013926213f;
    p = p * r + 0.0083632030f;
    p = p * r + 0.0416665544f;
    p = p * r + 0.1666657685f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    uint32_t bits;
    memcpy(&bits, &shifted, 4);
    bits = (bits + 127) << 23;
    float power_of_two;
    memcpy(&power_of_two, &bits, 4);
    return p * power_of_two;
}

/* The hash of `hash_groups` in splits.py, bit for bit. */
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

/* A row is worked on in whole vectors: its tail is filled with a shift whose exponential is 3e-308, which adds nothing.
 * So that loops have no remainder, a row of up to BUFFERED classes is copied to where -inf follows it, one row ahead: what
 * was just stored in parts cannot be loaded whole without a wait. */
enum { LANES = 8, WIDE = 16, SHORT = 128, BUFFERED = 1024 };
#define NOTHING -708.0
#define ABSENT -1e30 /* what the score of an absent option, whose logit is -inf, falls by in a linear map */

INLINE int64_t padded_width(int64_t classes) {
    return classes <= BUFFERED ? (classes + WIDE - 1) / WIDE * WIDE : classes;
}

typedef struct {
    int64_t rows, classes, bins, groups;
    int deal;                                                 /* deal the rows to groups, or take group as it comes */
    const int64_t *labels;                                    /* NULL where the confidence pass is to say which class it is */
    double *confidence, *nll, *brier, *entropy, *label_prob;  /* a number a row */
    int64_t *predicted;
    const double *cuts;                                       /* bins - 1; p lies in bin #{cuts < p} */
    int64_t *group;                                           /* which part of gap a row adds to */
    double *count, *hits;                                     /* (bins, classes); bin 0 of count is left to the caller */
    double *gap;                                              /* (groups, bins, classes): sum of hits - p; NULL: no class-wise tally */
    const double *weights;                                    /* of the rows in the class-wise sums; NULL: 1 each */
    double beta;                                              /* multiplies the logits in the confidence pass */
    double *scratch;                                          /* classes + WIDE numbers */
} Pass;

#define DEFINE_PASS(NAME, REAL, INT, HASH)                                                                                \
    BEST_CPU static void NAME(const REAL *logits, const Pass *p) {                                                        \
        const int64_t K = p->classes, B = p->bins;                                                                        \
        double *e = p->scratch;                                                                                           \
        REAL buffer[2][BUFFERED + WIDE];                                                                                  \
        const int64_t width = padded_width(K);                                                                            \
        for (int64_t k = K; k < width; k++) buffer[0][k] = buffer[1][k] = -(REAL)INFINITY;                                \
        if (K <= BUFFERED && p->rows) memcpy(buffer[0], logits, (size_t)K * sizeof(REAL));                                \
        for (int64_t i = 0; i < p->rows; i++) {                                                                           \
            const REAL *z = logits + i * K;                                                                               \
            if (K <= BUFFERED) {                                                                                          \
                if (i + 1 < p->rows) memcpy(buffer[(i + 1) % 2], z + K, (size_t)K * sizeof(REAL));                        \
                z = buffer[i % 2];                                                                                        \
            }                                                                                                             \
            REAL top = z[0];                                                                                              \
            _Pragma("omp simd reduction(max : top)")                                                                      \
            for (int64_t k = 0; k < width; k++) top = z[k] > top ? z[k] : top;                                            \
            INT best = (INT)K; /* the lowest place of the largest logit, without a branch to mispredict */                \
            _Pragma("omp simd reduction(min : best)")                                                                     \
            for (INT k = 0; k < (INT)width; k++) best = z[k] == top && k < best ? k : best;                               \
            p->predicted[i] = best;                                                                                       \
            const double m = (double)top;                                                                                 \
            double sum = 0.0, dot = 0.0, square = 0.0;                                                                    \
            _Pragma("omp simd reduction(+ : sum, dot, square)")                                                           \
            for (int64_t k = 0; k < width; k++) {                                                                         \
                double d = (double)z[k] - m;                                                                              \
                d = d < NOTHING ? NOTHING : d; /* -inf too: 0 * inf is not 0 */                                           \
                const double x = exp_nonpositive(d);                                                                      \
                e[k] = x;                                                                                                 \
                sum += x;                                                                                                 \
                dot += x * d;                                                                                             \
                square += x * x;                                                                                          \
            }                                                                                                             \
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
            const double weight = p->weights ? p->weights[i] : 1.0, weighted = scale * weight;                            \
            _Pragma("omp simd")                                                                                           \
            for (int64_t k = 0; k < K; k++) gap[k] -= e[k] * weighted;                                                    \
            int64_t label_bin = 0;                                                                                        \
            if (B > 1 && scale > p->cuts[0]) {                                                                            \
                /* Fewer than 1/cut probabilities of a row can exceed a cut: look for them a block at a time. */          \
                const double threshold = p->cuts[0] * sum * (1.0 - 1e-12);                                                \
                for (int64_t from = 0; from < width; from += 64) {                                                        \
                    const int64_t to = from + 64 < width ? from + 64 : width;                                             \
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
                        p->count[b * K + k] += weight;                                                                    \
                        gap[k] += e[k] * weighted;                                                                        \
                        gap[b * K + k] -= e[k] * weighted;                                                                \
                    }                                                                                                     \
                }                                                                                                         \
            }                                                                                                             \
            p->hits[label_bin * K + y] += weight;                                                                         \
            gap[label_bin * K + y] += weight;                                                                             \
        }                                                                                                                 \
    }

/* Confidence and predicted class alone: an ECE needs no more. The quick ones work on float in float, taking short sums of
 * exponentials in that precision and adding them up in double: right to 4e-7. */
#define DEFINE_CONFIDENCE(NAME, REAL, WORK, INT, EXP)                                                                     \
    BEST_CPU static void NAME(const REAL *logits, const Pass *p) {                                                        \
        const int64_t K = p->classes, width = padded_width(K);                                                            \
        const WORK beta = (WORK)p->beta;                                                                                  \
        REAL buffer[2][BUFFERED + WIDE];                                                                                  \
        for (int64_t k = K; k < width; k++) buffer[0][k] = buffer[1][k] = -(REAL)INFINITY;                                \
        if (K <= BUFFERED && p->rows) memcpy(buffer[0], logits, (size_t)K * sizeof(REAL));                                \
        for (int64_t i = 0; i < p->rows; i++) {                                                                           \
            const REAL *z = logits + i * K;                                                                               \
            if (K <= BUFFERED) {                                                                                          \
                if (i + 1 < p->rows) memcpy(buffer[(i + 1) % 2], z + K, (size_t)K * sizeof(REAL));                        \
                z = buffer[i % 2];                                                                                        \
            }                                                                                                             \
            REAL top = z[0];                                                                                              \
            _Pragma("omp simd reduction(max : top)")                                                                      \
            for (int64_t k = 0; k < width; k++) top = z[k] > top ? z[k] : top;                                            \
            INT best = (INT)K;                                                                                            \
            if (p->labels) { /* whether the label is the lowest place of the largest logit: cheaper than which place is */\
                const INT y = (INT)p->labels[i];                                                                          \
                int before = z[y] != top;                                                                                 \
                if (!before) {                                                                                            \
                    _Pragma("omp simd reduction(| : before)")                                                             \
                    for (INT k = 0; k < y; k++) before |= z[k] == top;                                                    \
                }                                                                                                         \
                best = before ? -1 : y;                                                                                   \
            } else { /* the lowest place of the largest logit, without a branch to mispredict */                          \
                _Pragma("omp simd reduction(min : best)")                                                                 \
                for (INT k = 0; k < (INT)width; k++) best = z[k] == top && k < best ? k : best;                           \
            }                                                                                                             \
            double sum = 0.0;                                                                                             \
            for (int64_t from = 0; from < width; from += 256) {                                                           \
                const int64_t to = from + 256 < width ? from + 256 : width;                                               \
                WORK part = 0;                                                                                            \
                _Pragma("omp simd reduction(+ : part)")                                                                   \
                for (int64_t k = from; k < to; k++) part += EXP(((WORK)z[k] - (WORK)top) * beta);                         \
                sum += (double)part;                                                                                      \
            }                                                                                                             \
            p->confidence[i] = 1.0 / sum;                                                                                 \
            p->predicted[i] = best;                                                                                       \
        }                                                                                                                 \
    }

/* The same for short rows, a vector of rows side by side: a row alone would not fill a vector. */
#define DEFINE_SHORT(NAME, REAL, WORK, INT, EXP, WIDTH)                                                                   \
    BEST_CPU static void NAME(const REAL *logits, const Pass *p) {                                                        \
        const int64_t K = p->classes;                                                                                     \
        const WORK beta = (WORK)p->beta;                                                                                  \
        WORK d[SHORT * WIDTH], top[WIDTH], part[WIDTH];                                                                   \
        double sum[WIDTH];                                                                                                \
        INT best[WIDTH];                                                                                                  \
        for (int64_t i = 0; i < p->rows; i += WIDTH) {                                                                    \
            const int64_t rows = p->rows - i < WIDTH ? p->rows - i : WIDTH;                                               \
            for (int64_t r = 0; r < WIDTH; r++) {                                                                         \
                const REAL *z = logits + (i + (r < rows ? r : 0)) * K;                                                    \
                for (int64_t k = 0; k < K; k++) d[k * WIDTH + r] = (WORK)z[k];                                            \
            }                                                                                                             \
            for (int64_t r = 0; r < WIDTH; r++) top[r] = d[r], sum[r] = 0, best[r] = 0;                                   \
            for (INT k = 1; k < (INT)K; k++) {                                                                            \
                _Pragma("omp simd")                                                                                       \
                for (int64_t r = 0; r < WIDTH; r++) {                                                                     \
                    best[r] = d[k * WIDTH + r] > top[r] ? k : best[r];                                                    \
                    top[r] = d[k * WIDTH + r] > top[r] ? d[k * WIDTH + r] : top[r];                                       \
                }                                                                                                         \
            }                                                                                                             \
            for (int64_t from = 0; from < K; from += 16) {                                                                \
                const int64_t to = from + 16 < K ? from + 16 : K;                                                         \
                for (int64_t r = 0; r < WIDTH; r++) part[r] = 0;                                                          \
                for (int64_t k = from; k < to; k++) {                                                                     \
                    _Pragma("omp simd")                                                                                   \
                    for (int64_t r = 0; r < WIDTH; r++) part[r] += EXP((d[k * WIDTH + r] - top[r]) * beta);               \
                }                                                                                                         \
                for (int64_t r = 0; r < WIDTH; r++) sum[r] += (double)part[r];                                            \
            }                                                                                                             \
            for (int64_t r = 0; r < rows; r++) p->confidence[i + r] = 1.0 / sum[r], p->predicted[i + r] = best[r];        \
        }                                                                                                                 \
    }

DEFINE_CONFIDENCE(confidence_quick, float, float, int32_t, expf_nonpositive)
DEFINE_CONFIDENCE(confidence_float, float, double, int32_t, exp_nonpositive)
DEFINE_CONFIDENCE(confidence_double, double, double, int64_t, exp_nonpositive)
DEFINE_SHORT(short_quick, float, float, int32_t, expf_nonpositive, 16)
DEFINE_SHORT(short_float, float, double, int64_t, exp_nonpositive, 8)
DEFINE_SHORT(short_double, double, double, int64_t, exp_nonpositive, 8)

DEFINE_PASS(pass_float, float, int32_t, hash_float)
DEFINE_PASS(pass_double, double, int64_t, hash_double)

/* Sum over the rows of L = ln sum exp(beta z) - beta z_y and of its first two derivatives in beta:
 * sum p z - z_y, and the variance of z under p. z is taken from its row's maximum, which changes none of the three.
 * weights, one a row, may be NULL. The quick ones work on float in float, and add the rows up in double: good enough to
 * find where to look closely. */
#define DEFINE_TEMPERATURE(NAME, REAL, WORK, EXP, LEAST)                                                                  \
    BEST_CPU static void NAME(const REAL *logits, const int64_t *labels, int64_t rows, int64_t K, double beta,            \
                              const double *weights, double *scratch, double *out) {                                      \
        const int64_t padded = (K + WIDE - 1) / WIDE * WIDE;                                                              \
        WORK *e = (WORK *)scratch;                                                                                        \
        const WORK b = (WORK)beta, least = (WORK)LEAST / b; /* what adds nothing: an absent option, or far below */       \
        double value = 0.0, slope = 0.0, curvature = 0.0;                                                                 \
        for (int64_t i = 0; i < rows; i++) {                                                                              \
            const REAL *z = logits + i * K;                                                                               \
            REAL top = z[0];                                                                                              \
            _Pragma("omp simd reduction(max : top)")                                                                      \
            for (int64_t k = 1; k < K; k++) top = z[k] > top ? z[k] : top;                                                \
            const WORK m = (WORK)top;                                                                                     \
            for (int64_t k = 0; k < K; k++) {                                                                             \
                const WORK d = (WORK)z[k] - m;                                                                            \
                e[k] = d < least ? least : d;                                                                             \
            }                                                                                                             \
            for (int64_t k = K; k < padded; k++) e[k] = least;                                                            \
            WORK sum = 0, first = 0, second = 0;                                                                          \
            _Pragma("omp simd reduction(+ : sum, first, second)")                                                         \
            for (int64_t k = 0; k < padded; k++) {                                                                        \
                WORK d = e[k], x = EXP(b * d);                                                                            \
                sum += x;                                                                                                 \
                first += x * d;                                                                                           \
                second += x * d * d;                                                                                      \
            }                                                                                                             \
            const double label = (double)z[labels[i]] - (double)m, mean = (double)first / (double)sum;                    \
            const double g = weights ? weights[i] : 1.0;                                                                  \
            value += g * (log((double)sum) - beta * label);                                                               \
            slope += g * (mean - label);                                                                                  \
            curvature += g * ((double)second / (double)sum - mean * mean);                                                \
        }                                                                                                                 \
        out[0] = value;                                                                                                   \
        out[1] = slope;                                                                                                   \
        out[2] = curvature;                                                                                               \
    }

DEFINE_TEMPERATURE(temperature_quick, float, float, expf_nonpositive, -87)
DEFINE_TEMPERATURE(temperature_float, float, double, exp_nonpositive, NOTHING)
DEFINE_TEMPERATURE(temperature_double, double, double, exp_nonpositive, NOTHING)

/* The same for short rows, a vector of them side by side. */
#define DEFINE_SHORT_TEMPERATURE(NAME, REAL, WORK, EXP, WIDTH, LEAST)                                                     \
    BEST_CPU static void NAME(const REAL *logits, const int64_t *labels, int64_t rows, int64_t K, double beta,            \
                              const double *weights, double *scratch, double *out) {                                      \
        (void)scratch;                                                                                                    \
        const WORK b = (WORK)beta, least = (WORK)LEAST / b;                                                               \
        WORK d[SHORT * WIDTH], top[WIDTH], sum[WIDTH], first[WIDTH], second[WIDTH];                                       \
        double value = 0.0, slope = 0.0, curvature = 0.0;                                                                 \
        for (int64_t i = 0; i < rows; i += WIDTH) {                                                                       \
            const int64_t here = rows - i < WIDTH ? rows - i : WIDTH;                                                     \
            for (int64_t r = 0; r < WIDTH; r++) {                                                                         \
                const REAL *z = logits + (i + (r < here ? r : 0)) * K;                                                    \
                for (int64_t k = 0; k < K; k++) d[k * WIDTH + r] = (WORK)z[k];                                            \
            }                                                                                                             \
            for (int64_t r = 0; r < WIDTH; r++) top[r] = d[r], sum[r] = first[r] = second[r] = 0;                         \
            for (int64_t k = 1; k < K; k++) {                                                                             \
                _Pragma("omp simd")                                                                                       \
                for (int64_t r = 0; r < WIDTH; r++) top[r] = d[k * WIDTH + r] > top[r] ? d[k * WIDTH + r] : top[r];       \
            }                                                                                                             \
            for (int64_t k = 0; k < K; k++) {                                                                             \
                _Pragma("omp simd")                                                                                       \
                for (int64_t r = 0; r < WIDTH; r++) {                                                                     \
                    const WORK below = d[k * WIDTH + r] - top[r], shift = below < least ? least : below;                  \
                    const WORK x = EXP(b * shift);                                                                        \
                    sum[r] += x;                                                                                          \
                    first[r] += x * shift;                                                                                \
                    second[r] += x * shift * shift;                                                                       \
                }                                                                                                         \
            }                                                                                                             \
            for (int64_t r = 0; r < here; r++) {                                                                          \
                const double label = (double)d[labels[i + r] * WIDTH + r] - (double)top[r];                               \
                const double mean = (double)first[r] / (double)sum[r];                                                    \
                const double g = weights ? weights[i + r] : 1.0;                                                          \
                value += g * (log((double)sum[r]) - beta * label);                                                        \
                slope += g * (mean - label);                                                                              \
                curvature += g * ((double)second[r] / (double)sum[r] - mean * mean);                                      \
            }                                                                                                             \
        }                                                                                                                 \
        out[0] = value;                                                                                                   \
        out[1] = slope;                                                                                                   \
        out[2] = curvature;                                                                                               \
    }

DEFINE_SHORT_TEMPERATURE(short_temperature_quick, float, float, expf_nonpositive, WIDE, -87)
DEFINE_SHORT_TEMPERATURE(short_temperature_float, float, double, exp_nonpositive, LANES, NOTHING)
DEFINE_SHORT_TEMPERATURE(short_temperature_double, double, double, exp_nonpositive, LANES, NOTHING)

static PyObject *run_temperature(PyObject *self, PyObject *args) {
    (void)self;
    unsigned long long logits, labels, weights;
    long long rows, classes;
    int is_double, quick;
    double beta, out[3];
    if (!PyArg_ParseTuple(args, "KpKLLdKp", &logits, &is_double, &labels, &rows, &classes, &beta, &weights, &quick))
        return NULL;
    double *scratch = malloc(((size_t)classes + WIDE) * sizeof(double));
    if (!scratch) return PyErr_NoMemory();
    const int64_t *y = (const int64_t *)(uintptr_t)labels;
    const double *g = (const double *)(uintptr_t)weights;
    Py_BEGIN_ALLOW_THREADS
    const int is_short = classes <= SHORT;
    if (is_double)
        (is_short ? short_temperature_double : temperature_double)((const double *)(uintptr_t)logits, y, rows, classes, beta,
                                                                   g, scratch, out);
    else
        (quick ? (is_short ? short_temperature_quick : temperature_quick)
               : (is_short ? short_temperature_float : temperature_float))((const float *)(uintptr_t)logits, y, rows, classes,
                                                                           beta, g, scratch, out);
    free(scratch);
    Py_END_ALLOW_THREADS
    return Py_BuildValue("ddd", out[0], out[1], out[2]);
}

/* Sum over the rows of the likelihood loss of softmax(w * u + b), u = scale * z - shift, and its gradient in w and b.
 * out holds the loss, then K slopes in w, then K slopes in b. shift and weights, one a row, may be NULL. */
#define DEFINE_VECTOR(NAME, REAL, WORK, EXP)                                                                              \
    BEST_CPU static void NAME(const REAL *logits, const int64_t *labels, int64_t rows, int64_t K, const double *w,        \
                              const double *b, double scale, const double *shift, const double *weights, double *scratch, \
                              double *out) {                                                                              \
        WORK *restrict u = (WORK *)scratch, *restrict e = u + K, *restrict v = e + K, *restrict c = v + K;                \
        double *restrict dw = out + 1, *restrict db = out + 1 + K;                                                        \
        for (int64_t k = 0; k < K; k++) v[k] = (WORK)w[k], c[k] = (WORK)b[k];                                             \
        for (int64_t i = 0; i < rows; i++) {                                                                              \
            const REAL *z = logits + i * K;                                                                               \
            const double s = shift ? shift[i] : 0.0;                                                                      \
            WORK top = -(WORK)INFINITY;                                                                                   \
            _Pragma("omp simd reduction(max : top)")                                                                      \
            for (int64_t k = 0; k < K; k++) {                                                                             \
                const int absent = (double)z[k] == -INFINITY;                                                             \
                u[k] = (WORK)(absent ? 0.0 : scale * (double)z[k] - s);                                                   \
                e[k] = v[k] * u[k] + c[k] + (absent ? (WORK)ABSENT : 0);                                                  \
                top = e[k] > top ? e[k] : top;                                                                            \
            }                                                                                                             \
            const int64_t y = labels[i];                                                                                  \
            const double label = (double)e[y] - (double)top;                                                              \
            WORK sum = 0;                                                                                                 \
            _Pragma("omp simd reduction(+ : sum)")                                                                        \
            for (int64_t k = 0; k < K; k++) {                                                                             \
                e[k] = EXP(e[k] - top);                                                                                   \
                sum += e[k];                                                                                              \
            }                                                                                                             \
            const double g = weights ? weights[i] : 1.0;                                                                  \
            const WORK inverse = (WORK)g / sum;                                                                           \
            _Pragma("omp simd")                                                                                           \
            for (int64_t k = 0; k < K; k++) {                                                                             \
                const WORK p = e[k] * inverse;                                                                            \
                dw[k] += (double)(p * u[k]);                                                                              \
                db[k] += (double)p;                                                                                       \
            }                                                                                                             \
            out[0] += g * (log((double)sum) - label);                                                                     \
            dw[y] -= g * (double)u[y];                                                                                    \
            db[y] -= g;                                                                                                   \
        }                                                                                                                 \
    }

DEFINE_VECTOR(vector_quick, float, float, expf_nonpositive)
DEFINE_VECTOR(vector_float, float, double, exp_nonpositive)
DEFINE_VECTOR(vector_double, double, double, exp_nonpositive)

/* The same for short rows, a vector of them side by side; each lane sums up some rows before they are added in double. */
#define DEFINE_SHORT_VECTOR(NAME, REAL, WORK, EXP, WIDTH)                                                                 \
    BEST_CPU static void NAME(const REAL *logits, const int64_t *labels, int64_t rows, int64_t K, const double *w,        \
                              const double *b, double scale, const double *shift, const double *weights, double *scratch, \
                              double *out) {                                                                              \
        (void)scratch;                                                                                                    \
        WORK u[SHORT * WIDTH], e[SHORT * WIDTH], lane_dw[SHORT * WIDTH], lane_db[SHORT * WIDTH];                          \
        WORK v[SHORT], c[SHORT], top[WIDTH], sum[WIDTH];                                                                  \
        double *dw = out + 1, *db = out + 1 + K;                                                                          \
        for (int64_t k = 0; k < K; k++) v[k] = (WORK)w[k], c[k] = (WORK)b[k];                                             \
        for (int64_t from = 0; from < rows; from += 32 * WIDTH) {                                                         \
            const int64_t to = from + 32 * WIDTH < rows ? from + 32 * WIDTH : rows;                                       \
            for (int64_t j = 0; j < K * WIDTH; j++) lane_dw[j] = lane_db[j] = 0;                                          \
            for (int64_t i = from; i < to; i += WIDTH) {                                                                  \
                const int64_t here = to - i < WIDTH ? to - i : WIDTH;                                                     \
                for (int64_t r = 0; r < WIDTH; r++) {                                                                     \
                    const int64_t row = i + (r < here ? r : 0);                                                           \
                    const REAL *z = logits + row * K;                                                                     \
                    const double s = shift ? shift[row] : 0.0;                                                            \
                    for (int64_t k = 0; k < K; k++) {                                                                     \
                        const int absent = (double)z[k] == -INFINITY;                                                     \
                        u[k * WIDTH + r] = (WORK)(absent ? 0.0 : scale * (double)z[k] - s);                               \
                        e[k * WIDTH + r] = absent ? (WORK)ABSENT : 0;                                                     \
                    }                                                                                                     \
                }                                                                                                         \
                for (int64_t r = 0; r < WIDTH; r++) top[r] = -(WORK)INFINITY, sum[r] = 0;                                 \
                for (int64_t k = 0; k < K; k++) {                                                                         \
                    _Pragma("omp simd")                                                                                   \
                    for (int64_t r = 0; r < WIDTH; r++) {                                                                 \
                        const WORK x = v[k] * u[k * WIDTH + r] + c[k] + e[k * WIDTH + r];                                 \
                        e[k * WIDTH + r] = x;                                                                             \
                        top[r] = x > top[r] ? x : top[r];                                                                 \
                    }                                                                                                     \
                }                                                                                                         \
                for (int64_t r = 0; r < here; r++) {                                                                      \
                    const int64_t y = labels[i + r];                                                                      \
                    const double g = weights ? weights[i + r] : 1.0;                                                      \
                    out[0] += g * ((double)top[r] - (double)e[y * WIDTH + r]);                                            \
                    dw[y] -= g * (double)u[y * WIDTH + r];                                                                \
                    db[y] -= g;                                                                                           \
                }                                                                                                         \
                for (int64_t k = 0; k < K; k++) {                                                                         \
                    _Pragma("omp simd")                                                                                   \
                    for (int64_t r = 0; r < WIDTH; r++) {                                                                 \
                        e[k * WIDTH + r] = EXP(e[k * WIDTH + r] - top[r]);                                                \
                        sum[r] += e[k * WIDTH + r];                                                                       \
                    }                                                                                                     \
                }                                                                                                         \
                for (int64_t r = 0; r < here; r++) out[0] += (weights ? weights[i + r] : 1.0) * log((double)sum[r]);      \
                for (int64_t r = 0; r < WIDTH; r++)                                                                       \
                    sum[r] = r < here ? (weights ? (WORK)weights[i + r] : 1) / sum[r] : 0;                                \
                for (int64_t k = 0; k < K; k++) {                                                                         \
                    _Pragma("omp simd")                                                                                   \
                    for (int64_t r = 0; r < WIDTH; r++) {                                                                 \
                        const WORK p = e[k * WIDTH + r] * sum[r];                                                         \
                        lane_dw[k * WIDTH + r] += p * u[k * WIDTH + r];                                                   \
                        lane_db[k * WIDTH + r] += p;                                                                      \
                    }                                                                                                     \
                }                                                                                                         \
            }                                                                                                             \
            for (int64_t k = 0; k < K; k++)                                                                               \
                for (int64_t r = 0; r < WIDTH; r++)                                                                       \
                    dw[k] += (double)lane_dw[k * WIDTH + r], db[k] += (double)lane_db[k * WIDTH + r];                     \
        }                                                                                                                 \
    }

DEFINE_SHORT_VECTOR(short_vector_quick, float, float, expf_nonpositive, WIDE)
DEFINE_SHORT_VECTOR(short_vector_float, float, double, exp_nonpositive, LANES)
DEFINE_SHORT_VECTOR(short_vector_double, double, double, exp_nonpositive, LANES)

static PyObject *run_vector(PyObject *self, PyObject *args) {
    (void)self;
    unsigned long long logits, labels, w, b, shift, weights, out;
    long long rows, classes;
    int is_double, quick;
    double scale;
    if (!PyArg_ParseTuple(args, "KpKLLKKdKKKp", &logits, &is_double, &labels, &rows, &classes, &w, &b, &scale, &shift,
                          &weights, &out, &quick))
        return NULL;
    double *scratch = malloc((size_t)classes * 4 * sizeof(double));
    if (!scratch) return PyErr_NoMemory();
#define AT(X, TYPE) ((TYPE *)(uintptr_t)X)
#define RUN(KIND, REAL)                                                                                                   \
    (classes <= SHORT ? short_vector_##KIND : vector_##KIND)(AT(logits, const REAL), AT(labels, const int64_t), rows,     \
                                                             classes, AT(w, const double), AT(b, const double), scale,    \
                                                             AT(shift, const double), AT(weights, const double), scratch, \
                                                             AT(out, double))
    Py_BEGIN_ALLOW_THREADS
    if (is_double)
        RUN(double, double);
    else if (quick)
        RUN(quick, float);
    else
        RUN(float, float);
    free(scratch);
    Py_END_ALLOW_THREADS
#undef RUN
#undef AT
    Py_RETURN_NONE;
}

/* For each value the number of cuts below it: few cuts are all compared, many are searched by halves. */
BEST_CPU static void locate(const double *values, int64_t n, const double *cuts, int64_t m, int64_t *out) {
    for (int64_t i = 0; i < n; i++) {
        int64_t below = 0, width = m;
        if (m <= 32) {
            _Pragma("omp simd reduction(+ : below)")
            for (int64_t j = 0; j < m; j++) below += cuts[j] < values[i];
        } else {
            while (width > 0) {
                const int64_t half = width / 2;
                const int above = cuts[below + half] < values[i];
                below += above ? half + 1 : 0;
                width = above ? width - half - 1 : half;
            }
        }
        out[i] = below;
    }
}

static PyObject *run_locate(PyObject *self, PyObject *args) {
    (void)self;
    unsigned long long values, cuts, out;
    long long n, m;
    if (!PyArg_ParseTuple(args, "KLKLK", &values, &n, &cuts, &m, &out)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    locate((const double *)(uintptr_t)values, n, (const double *)(uintptr_t)cuts, m, (int64_t *)(uintptr_t)out);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* Confidences straight into bins, a block of rows at a time: out holds count, confidence and hits, `bins` numbers each. */
static PyObject *run_top(PyObject *self, PyObject *args) {
    (void)self;
    enum { BLOCK = 1024 };
    unsigned long long logits_at, labels_at, cuts_at, out_at;
    long long rows, classes, bins;
    int is_double;
    if (!PyArg_ParseTuple(args, "KpKLLKLK", &logits_at, &is_double, &labels_at, &rows, &classes, &cuts_at, &bins, &out_at))
        return NULL;
    const int64_t *labels = (const int64_t *)(uintptr_t)labels_at;
    const double *cuts = (const double *)(uintptr_t)cuts_at;
    double *out = (double *)(uintptr_t)out_at;
    Py_BEGIN_ALLOW_THREADS
    double confidence[BLOCK];
    int64_t predicted[BLOCK], bin[BLOCK];
    const int is_short = classes <= 40;
    for (int64_t from = 0; from < rows; from += BLOCK) {
        const int64_t n = rows - from < BLOCK ? rows - from : BLOCK;
        const Pass p = {.rows = n,
                        .classes = classes,
                        .labels = labels + from,
                        .confidence = confidence,
                        .predicted = predicted,
                        .beta = 1.0};
        if (is_double)
            (is_short ? short_double : confidence_double)((const double *)(uintptr_t)logits_at + from * classes, &p);
        else
            (is_short ? short_quick : confidence_quick)((const float *)(uintptr_t)logits_at + from * classes, &p);
        locate(confidence, n, cuts, bins - 1, bin);
        for (int64_t i = 0; i < n; i++) {
            out[bin[i]] += 1.0;
            out[bins + bin[i]] += confidence[i];
            out[2 * bins + bin[i]] += predicted[i] == labels[from + i];
        }
    }
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* Whether all numbers lie above the least and are finite: one pass, where a minimum and a maximum take two. */
#define DEFINE_WITHIN(NAME, REAL)                                                                                         \
    BEST_CPU static int NAME(const REAL *z, int64_t n, REAL least) {                                                      \
        for (int64_t from = 0; from < n; from += 4096) {                                                                  \
            const int64_t to = from + 4096 < n ? from + 4096 : n;                                                         \
            int beyond = 0;                                                                                               \
            _Pragma("omp simd reduction(| : beyond)")                                                                     \
            for (int64_t k = from; k < to; k++) beyond |= !(z[k] > least && z[k] < (REAL)INFINITY);                       \
            if (beyond) return 0;                                                                                         \
        }                                                                                                                 \
        return 1;                                                                                                         \
    }

DEFINE_WITHIN(within_float, float)
DEFINE_WITHIN(within_double, double)

static PyObject *run_within(PyObject *self, PyObject *args) {
    (void)self;
    unsigned long long numbers;
    long long n;
    int is_double, within;
    double least;
    if (!PyArg_ParseTuple(args, "KpLd", &numbers, &is_double, &n, &least)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    if (is_double)
        within = within_double((const double *)(uintptr_t)numbers, n, least);
    else
        within = within_float((const float *)(uintptr_t)numbers, n, (float)least);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(within);
}

/* The quick hash of each row, and whether any two rows share one: a table of twice their number, probed in order. */
static PyObject *run_hash(PyObject *self, PyObject *args) {
    (void)self;
    unsigned long long logits_at, labels_at, out_at;
    long long rows, classes;
    int is_double, repeated = 0;
    if (!PyArg_ParseTuple(args, "KpKLLK", &logits_at, &is_double, &labels_at, &rows, &classes, &out_at)) return NULL;
    const int64_t *labels = (const int64_t *)(uintptr_t)labels_at;
    uint64_t *out = (uint64_t *)(uintptr_t)out_at;
    size_t size = 16;
    while (size < 2 * (size_t)rows) size *= 2;
    uint64_t *seen = calloc(size, sizeof(uint64_t)); /* 0 is an empty place, so a hash of 0 counts as 1 */
    if (!seen) return PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS
    for (int64_t i = 0; i < rows; i++) {
        if (is_double) {
            const double *z = (const double *)(uintptr_t)logits_at + i * classes;
            out[i] = hash_double(z[0], z[labels[i]], z[classes - 1], labels[i]);
        } else {
            const float *z = (const float *)(uintptr_t)logits_at + i * classes;
            out[i] = hash_float(z[0], z[labels[i]], z[classes - 1], labels[i]);
        }
        const uint64_t hash = out[i] ? out[i] : 1;
        size_t place = (size_t)hash & (size - 1);
        while (!repeated && seen[place] && seen[place] != hash) place = (place + 1) & (size - 1);
        repeated |= seen[place] == hash;
        seen[place] = hash;
    }
    free(seen);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(repeated);
}

/* Addresses come as integers of NumPy memory; the callers in row_scores.py and loss_sums.py own the memory. */
static PyObject *run_pass(PyObject *self, PyObject *args) {
    (void)self;
    unsigned long long a[14];
    long long rows, classes, bins, groups;
    int is_double, deal, quick;
    double beta;
    if (!PyArg_ParseTuple(args, "KpLLLLppdKKKKKKKKKKKKK", &a[0], &is_double, &rows, &classes, &bins, &groups, &deal,
                          &quick, &beta, &a[1], &a[2], &a[3], &a[4], &a[5], &a[6], &a[7], &a[8], &a[9], &a[10], &a[11], &a[12],
                          &a[13]))
        return NULL;
#define AT(I, TYPE) ((TYPE *)(uintptr_t)a[I])
    Pass p = {.rows = rows,
              .classes = classes,
              .bins = bins,
              .groups = groups,
              .deal = deal,
              .beta = beta,
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
              .gap = AT(12, double),
              .weights = AT(13, const double)};
#undef AT
    p.scratch = malloc(((size_t)classes + WIDE) * sizeof(double));
    if (!p.scratch) return PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS
    const void *logits = (const void *)(uintptr_t)a[0];
    const int with_labels = p.labels != NULL, is_short = classes <= 40;
    if (is_double)
        (with_labels ? pass_double : is_short ? short_double : confidence_double)((const double *)logits, &p);
    else if (quick)
        (is_short ? short_quick : confidence_quick)((const float *)logits, &p);
    else
        (with_labels ? pass_float : is_short ? short_float : confidence_float)((const float *)logits, &p);
    free(p.scratch);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {{"run_pass", run_pass, METH_VARARGS, "Fused pass over rows of logits; see row_scores.py."},
                                {"run_temperature", run_temperature, METH_VARARGS, "Loss, slope and curvature in 1/T."},
                                {"run_vector", run_vector, METH_VARARGS, "Loss of vector scaling and its gradient."},
                                {"run_top", run_top, METH_VARARGS, "Confidences and hits, tallied in bins."},
                                {"run_hash", run_hash, METH_VARARGS, "Quick hashes of rows, and whether two are equal."},
                                {"run_within", run_within, METH_VARARGS, "Whether numbers are finite and above one."},
                                {"run_locate", run_locate, METH_VARARGS, "How many cuts lie below each value."},
                                {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", NULL, -1, methods, NULL, NULL, NULL, NULL};
PyMODINIT_FUNC PyInit__native(void) { return PyModule_Create(&module); }
