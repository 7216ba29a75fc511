/* How the lanes of a scope copy together: 16 bytes a lane and store, for any two addresses.
 *
 * Stores are aligned by a head of single bytes. Loads then are 16 bytes wide when source and destination lie alike in
 * their 16 bytes, and else 4 bytes wide: from aligned words whose bytes are shifted into place. No aligned word is read
 * that holds none of the source's bytes, so nothing outside of its memory is. */
#ifndef FUSELINK_COPY_CUH
#define FUSELINK_COPY_CUH

#include "order.cuh"

FL_FN void fl_copy_bytes(uint64_t dst, uint64_t src, uint64_t bytes, uint64_t lane, uint64_t lanes) {
  FL_ROLLED
  for (uint64_t i = lane; i < bytes; i += lanes) fl_at<uint8_t>(dst)[i] = fl_at<const uint8_t>(src)[i];
}

/* Both aligned to 16. Three loads before the stores that wait for them: a lane alone cannot hide their way otherwise, and
 * a fourth would cost a block its place beside another one. */
FL_FN void fl_copy_alike(uint64_t dst, uint64_t src, uint64_t units, uint64_t lane, uint64_t lanes) {
  uint64_t i = lane, stride = 16 * lanes;
  FL_ROLLED
  for (; i + 2 * lanes < units; i += 3 * lanes) {
    uint64_t from = src + 16 * i, to = dst + 16 * i;
    FlWide a = fl_load_wide(from), b = fl_load_wide(from + stride), c = fl_load_wide(from + 2 * stride);
    fl_store_wide(to, a);
    fl_store_wide(to + stride, b);
    fl_store_wide(to + 2 * stride, c);
  }
  FL_ROLLED
  for (; i < units; i += lanes) fl_store_wide(dst + 16 * i, fl_load_wide(src + 16 * i));
}

/* The destination aligned to 16, the source to 4. */
FL_FN void fl_copy_words(uint64_t dst, uint64_t src, uint64_t units, uint64_t lane, uint64_t lanes) {
  FL_ROLLED
  for (uint64_t i = lane; i < units; i += lanes) {
    uint64_t from = src + 16 * i;
    fl_store_wide(dst + 16 * i, FlWide{{fl_load_word(from), fl_load_word(from + 4), fl_load_word(from + 8),
                                        fl_load_word(from + 12)}});
  }
}

/* The destination aligned to 16, the source to nothing. */
FL_FN void fl_copy_shifted(uint64_t dst, uint64_t src, uint64_t units, uint64_t lane, uint64_t lanes) {
  uint32_t shift = 8 * (uint32_t)(src & 3);
  FL_ROLLED
  for (uint64_t i = lane; i < units; i += lanes) {
    uint64_t from = (src & ~3ull) + 16 * i;
    uint32_t a = fl_load_word(from), b = fl_load_word(from + 4), c = fl_load_word(from + 8);
    uint32_t d = fl_load_word(from + 12), e = fl_load_word(from + 16);
    fl_store_wide(dst + 16 * i,
                  FlWide{{fl_funnel(a, b, shift), fl_funnel(b, c, shift), fl_funnel(c, d, shift), fl_funnel(d, e, shift)}});
  }
}

/* The part of a copy that lane `lane` of `lanes` does. */
FL_FN void fl_copy_lanes(uint64_t dst, uint64_t src, uint64_t bytes, uint32_t lane, uint32_t lanes) {
  uint64_t head = (16 - (dst & 15)) & 15;
  if (head > bytes) head = bytes;
  fl_copy_bytes(dst, src, head, lane, lanes);
  dst += head;
  src += head;
  uint64_t units = (bytes - head) / 16;
  if ((src & 15) == 0) {
    fl_copy_alike(dst, src, units, lane, lanes);
  } else if ((src & 3) == 0) {
    fl_copy_words(dst, src, units, lane, lanes);
  } else {
    fl_copy_shifted(dst, src, units, lane, lanes);
  }
  fl_copy_bytes(dst + 16 * units, src + 16 * units, bytes - head - 16 * units, lane, lanes);
}

#endif
