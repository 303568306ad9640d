/* Rows that were kept in a cache, and where those lie that a row of a head reads. */
#include "foredraft.h"
#include "simd.h"

int fd_previous_slots(const fd_batch *batch, int64_t *slots) {
    if (!batch || !slots || !batch->sequences || !batch->block_tables || !batch->prefix_lens || !batch->path_lens)
        return FD_NULL;
    if (batch->rows < 0 || batch->block_size < 1 || (batch->depth && !batch->paths)) return FD_SHAPE;
    for (int64_t row = 0; row < batch->rows; row++) {
        int64_t prefix = batch->prefix_lens[row], keys = prefix + batch->path_lens[row];
        int64_t sequence = batch->sequences[row], offset = keys < 2 ? 0 : keys - 2;
        if (keys >= 2 && offset >= prefix) {
            if (prefix < 0 || offset - prefix >= batch->depth) return FD_RANGE;
            offset = batch->paths[row * batch->depth + offset - prefix];
        }
        int64_t block = offset / batch->block_size;
        if (sequence < 0 || sequence >= batch->num_sequences || offset < 0 || block >= batch->table_width)
            return FD_RANGE;
        slots[row] = batch->block_tables[sequence * batch->table_width + block] * batch->block_size +
                     offset % batch->block_size;
    }
    return FD_OK;
}

int fd_read(const fd_cache *cache, const int64_t *parts, int64_t count, const int64_t *slots, int64_t rows, float *y) {
    if (!cache || !cache->data || !slots || !y) return FD_NULL;
    int64_t width = cache->width;
    if (rows < 0 || width < 1 || cache->parts < 1 || count < 1 || (!parts && count != cache->parts)) return FD_SHAPE;
    for (int64_t row = 0; row < rows; row++)
        if (slots[row] < 0 || slots[row] >= cache->slots) return FD_RANGE;
    for (int64_t i = 0; parts && i < count; i++)
        if (parts[i] < 0 || parts[i] >= cache->parts) return FD_RANGE;
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < count; i++, y += width) {
            int64_t at = (slots[row] * cache->parts + (parts ? parts[i] : i)) * width;
            if (cache->is_bf16)
                for (int64_t k = 0; k < width; k++) y[k] = widen_bf16(((const uint16_t *)cache->data)[at + k]);
            else memcpy(y, (const float *)cache->data + at, 4 * (size_t)width);
        }
    return FD_OK;
}
