/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/* What the server sees of the pool beside what Linux's code sees of it (shim.h). */
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
	bool taken;
};

/* Nothing is taken; the pool begins at the physical address `base`. */
void pool_reset(u64 base);
const struct note *pool_note(size_t page);
/* Pages from here on were never used. */
size_t pool_end(void);
/* Complaints since the last call. */
u64 pool_complaints(void);

#endif
