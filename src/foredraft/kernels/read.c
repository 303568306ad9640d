/* Rows that were kept in a cache, as heads read them. */
#include "foredraft.h"
#include "simd.h"

static int check(const fd_cache *cache, const int64_t *parts, int64_t count, int64_t rows) {
    if (!cache || !cache->data) return FD_NULL;
    if (rows < 0 || cache->width < 1 || cache->parts < 1 || count < 1 || (!parts && count != cache->parts)) return FD_SHAPE;
    for (int64_t i = 0; parts && i < count; i++)
        if (parts[i] < 0 || parts[i] >= cache->parts) return FD_RANGE;
    return FD_OK;
}

static int read_row(const fd_cache *cache, const int64_t *parts, int64_t count, int64_t slot, float *y) {
    if (slot < 0 || slot >= cache->slots) return FD_RANGE;
    for (int64_t i = 0, width = cache->width; i < count; i++, y += width) {
        int64_t at = (slot * cache->parts + (parts ? parts[i] : i)) * width;
        if (cache->is_bf16)
            for (int64_t k = 0; k < width; k++) y[k] = widen_bf16(((const uint16_t *)cache->data)[at + k]);
        else memcpy(y, (const float *)cache->data + at, 4 * (size_t)width);
    }
    return FD_OK;
}

int fd_read(const fd_cache *cache, const int64_t *parts, int64_t count, const int64_t *slots, int64_t rows, float *y) {
    int error = !slots || !y ? FD_NULL : check(cache, parts, count, rows);
    for (int64_t row = 0; row < rows && !error; row++)
        error = read_row(cache, parts, count, slots[row], y + row * count * cache->width);
    return error;
}

int fd_read_previous(const fd_cache *cache, const int64_t *parts, int64_t count, const fd_batch *batch, float *y) {
    if (!y || !batch || !batch->sequences || !batch->block_tables || !batch->prefix_lens || !batch->path_lens)
        return FD_NULL;
    if (batch->block_size < 1 || (batch->depth && !batch->paths)) return FD_SHAPE;
    int error = check(cache, parts, count, batch->rows);
    for (int64_t row = 0; row < batch->rows && !error; row++) {
        int64_t prefix = batch->prefix_lens[row], keys = prefix + batch->path_lens[row];
        int64_t sequence = batch->sequences[row], offset = keys < 2 ? 0 : keys - 2;
        if (keys >= 2 && offset >= prefix) {
            if (prefix < 0 || offset - prefix >= batch->depth) return FD_RANGE;
            offset = batch->paths[row * batch->depth + offset - prefix];
        }
        int64_t block = offset / batch->block_size;
        if (sequence < 0 || sequence >= batch->num_sequences || offset < 0 || block >= batch->table_width)
            return FD_RANGE;
        int64_t first = batch->block_tables[sequence * batch->table_width + block] * batch->block_size;
        error = read_row(cache, parts, count, first + offset % batch->block_size, y + row * count * cache->width);
    }
    return error;
}
