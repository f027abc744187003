/* The sums of whole rows of a fingerprint, whose formula is in mix.py: each word of the state is read once and multiplied
   once, while NumPy goes over each block three times. Python's headers are not needed: mix.py's numbers go in and out
   through ctypes (compiled.py). */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "two neighbouring elements are low + 2^32 high on little-endian machines alone; NumPy is used here"
#endif

/* One for each generation of processors, chosen when the library is loaded. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define FOR_EACH_PROCESSOR __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif

/* bits: 32-bit floats, rows * 2 * words of them, beginning anywhere; factors: one a word; sums: one a row. */
FOR_EACH_PROCESSOR
void ckpt_patches_sums_of_rows(const unsigned char *bits, size_t rows, size_t words, const uint64_t *factors,
                               uint64_t *sums) {
    for (size_t row = 0; row < rows; row++) {
        const unsigned char *begin = bits + row * words * sizeof(uint64_t);
        uint64_t sum = 0;
        for (size_t number = 0; number < words; number++) {
            uint64_t word;
            memcpy(&word, begin + number * sizeof word, sizeof word); /* may be unaligned: a load all the same */
            sum += (word + (word >> 32)) * factors[number];
        }
        sums[row] = sum;
    }
}
