/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/* Side of the pool that the server sees, beside what Linux's code sees of it (shim.h). */
#ifndef DMASPACE_POOL_H
#define DMASPACE_POOL_H

#include "shim.h"

#define POOL_BYTES (256ul << 20)
#define POOL_PAGES (POOL_BYTES / PAGE_SIZE)

/* About one page of the pool. */
struct note {
	struct list_head link;
	/* Pages of the block that begins here; 0 where none does. */
	size_t pages;
	/* When recycled: of the first page of a block only. */
	bool taken;
	/* When recycled and free: the free block below this one, plus 1. */
	unsigned int below;
};

enum pool_mode {
	/* Blocks are taken from the lowest place that is free. */
	POOL_LOWEST,
	/* The block that was freed last is taken first. */
	POOL_RECYCLED,
	/* The same in huge pages, as far as the machine gives them. */
	POOL_RECYCLED_HUGE,
};

/* Nothing is taken; the pool begins at the physical address `base`. */
void pool_reset(u64 base, enum pool_mode mode);
/* How often new memory was needed: recycled memory did not suffice. */
u64 pool_grown(void);
const struct note *pool_note(size_t page);
/* Pages from here on were never used. */
size_t pool_end(void);
/* Complaints since the last call. */
u64 pool_complaints(void);

#endif
