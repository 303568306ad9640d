/* Texts that grow and shrink at their end and are forgotten from their start, with the places of their n-grams.
 * proposers/occurrences.py does the same in Python. */
#include "text.h"

#include <stdlib.h>
#include <string.h>

static uint64_t hash_before(const int32_t *end, int64_t n) {
    uint64_t hash = 0;
    for (int64_t i = 1; i <= n; i++) hash = (hash + (uint32_t)end[-i] + 1) * 0x9E3779B97F4A7C15u;
    hash = (hash ^ hash >> 32) * 0xD6E8FEB86659FD93u;
    return hash ^ hash >> 32;
}

/* The slot of this hash, or the free one where it belongs. */
static gram_slot *find(const gram_table *table, uint64_t hash) {
    uint64_t at = hash & table->mask;
    while (table->slots[at].place && table->slots[at].hash != hash) at = (at + 1) & table->mask;
    return &table->slots[at];
}

/* Free a slot. Those behind it move up, so that none is cut off from where its hash begins to look. */
static void vacate(gram_table *table, gram_slot *freed) {
    uint64_t mask = table->mask, hole = (uint64_t)(freed - table->slots);
    for (uint64_t at = (hole + 1) & mask; table->slots[at].place; at = (at + 1) & mask) {
        uint64_t home = table->slots[at].hash & mask;
        if (((at - home) & mask) >= ((at - hole) & mask)) {
            table->slots[hole] = table->slots[at];
            hole = at;
        }
    }
    table->slots[hole].place = 0;
    table->used--;
}

/* Make room for so many n-grams. */
static int widen(gram_table *table, uint64_t needed) {
    uint64_t size = table->slots ? table->mask + 1 : 0, wider = 64;
    if (2 * needed <= size) return FD_OK;
    while (wider < 2 * needed) wider *= 2;
    gram_slot *old = table->slots, *slots = calloc(wider, sizeof(gram_slot));
    if (!slots) return FD_NO_MEMORY;
    table->slots = slots;
    table->mask = wider - 1;
    for (uint64_t at = 0; at < size; at++)
        if (old[at].place) *find(table, old[at].hash) = old[at];
    free(old);
    return FD_OK;
}

static int resize(int32_t **items, int64_t capacity) {
    int32_t *moved = realloc(*items, (size_t)capacity * sizeof(int32_t));
    if (moved) *items = moved;
    return moved ? FD_OK : FD_NO_MEMORY;
}

/* Make room for so many further tokens; where memory is short, the text stays as it is. */
static int reserve(fd_text *text, int64_t more) {
    int64_t needed = text->count + more, capacity = 2 * text->capacity;
    if (more > INT32_MAX || needed > INT32_MAX) return FD_RANGE;
    if (needed > text->capacity) {
        if (capacity < needed) capacity = needed < 64 ? 64 : needed;
        if (resize(&text->tokens, capacity)) return FD_NO_MEMORY;
        for (int i = 0; i < text->num_lengths; i++)
            if (resize(&text->lengths[i].back, capacity)) return FD_NO_MEMORY;
        text->capacity = capacity;
    }
    for (int i = 0; i < text->num_lengths; i++)
        if (widen(&text->lengths[i], text->lengths[i].used + (uint64_t)more)) return FD_NO_MEMORY;
    return FD_OK;
}

void fd_text_free(fd_text *text) {
    if (!text) return;
    for (int i = 0; i < text->num_lengths; i++) {
        free(text->lengths[i].slots);
        free(text->lengths[i].back);
    }
    free(text->tokens);
    free(text);
}

fd_text *fd_text_new(const int64_t *lengths, int64_t num_lengths) {
    fd_text *text = num_lengths >= 1 && num_lengths <= FD_TEXT_LENGTHS ? calloc(1, sizeof(fd_text)) : NULL;
    if (!text) return NULL;
    text->num_lengths = num_lengths;
    for (int i = 0; i < num_lengths; i++) text->lengths[i].n = lengths[i];
    if (reserve(text, 1) == FD_OK) return text;
    fd_text_free(text);
    return NULL;
}

static void push(fd_text *text, int32_t token) {
    int64_t place = text->offset + text->count;
    for (int i = 0; i < text->num_lengths; i++) {
        gram_table *table = &text->lengths[i];
        if (place - text->start < table->n) break;
        uint64_t hash = hash_before(text->tokens + text->count, table->n);
        gram_slot *slot = find(table, hash);
        table->back[text->count] = slot->place ? (int32_t)(place - slot->place) : 0;
        table->used += !slot->place;
        slot->hash = hash;
        slot->place = place;
    }
    text->tokens[text->count++] = token;
}

static void pop(fd_text *text) {
    int64_t place = text->offset + --text->count;
    for (int i = 0; i < text->num_lengths; i++) {
        gram_table *table = &text->lengths[i];
        if (place - text->start < table->n) break;
        gram_slot *slot = find(table, hash_before(text->tokens + text->count, table->n));
        int64_t back = table->back[text->count];
        if (back && place - back >= text->start + table->n)
            slot->place = place - back;
        else
            vacate(table, slot);
    }
}

int64_t fd_text_replace(fd_text *text, int64_t from, const int32_t *tokens, int64_t count) {
    int64_t known = text->offset + text->count - from, alike = 0;
    if (from < text->start || known < 0 || count < 0) return -FD_RANGE;
    const int32_t *mine = text->tokens + (from - text->offset);
    while (alike < known && alike < count && mine[alike] == tokens[alike]) alike++;
    int error = reserve(text, count - alike);
    if (error) return -error;
    for (int64_t i = alike; i < known; i++) pop(text);
    for (int64_t i = alike; i < count; i++) push(text, tokens[i]);
    return known - alike;
}

int fd_text_forget(fd_text *text, int64_t count) {
    int64_t first = text->start, end = text->offset + text->count;
    if (count < 0 || count > end - first) return FD_RANGE;
    text->start += count;
    for (int i = 0; i < text->num_lengths; i++) {
        gram_table *table = &text->lengths[i];
        for (int64_t place = first + table->n; place < first + table->n + count && place < end; place++) {
            gram_slot *slot = find(table, hash_before(text->tokens + (place - text->offset), table->n));
            if (slot->place && slot->place < text->start + table->n) vacate(table, slot);
        }
    }
    int64_t cut = text->start - text->offset;
    if (2 * cut < text->count) return FD_OK; /* to cut costs the length of what is left */
    text->count -= cut;
    text->offset = text->start;
    memmove(text->tokens, text->tokens + cut, (size_t)text->count * sizeof(int32_t));
    for (int i = 0; i < text->num_lengths; i++)
        memmove(text->lengths[i].back, text->lengths[i].back + cut, (size_t)text->count * sizeof(int32_t));
    return FD_OK;
}

void fd_text_size(const fd_text *text, int64_t *num_tokens, int64_t *num_grams) {
    *num_tokens = text->count;
    *num_grams = 0;
    for (int i = 0; i < text->num_lengths; i++) *num_grams += (int64_t)text->lengths[i].used;
}

int fd_text_latest(const fd_text *text, int length, const int32_t *end, int64_t size, int most, int64_t *places) {
    const gram_table *table = &text->lengths[length];
    int found = 0;
    if (size < table->n) return 0;
    int64_t place = find(table, hash_before(end, table->n))->place;
    while (place >= text->start + table->n && found < most) {
        places[found++] = place;
        int64_t back = table->back[place - text->offset];
        place = back ? place - back : 0;
    }
    return found;
}
