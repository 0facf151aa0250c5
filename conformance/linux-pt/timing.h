/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/* Work of Linux's tables that is timed in this process. */
#ifndef DMASPACE_TIMING_H
#define DMASPACE_TIMING_H

#include "table.h"

/* The numbers are those of src/timing.rs, which says what each is. */
enum kind {
	WORK_MAP,
	WORK_UNMAP,
	WORK_MAP_ALLOCATED,
	WORK_UNMAP_ALLOCATED,
	WORK_CYCLE,
	WORK_MAP_CHOSEN,
	WORK_UNMAP_CHOSEN,
	WORK_TRANSLATE,
	WORK_HARVEST,
};

enum work_flag {
	/* The other half of the tables is mapped. */
	WORK_HALF = 1 << 0,
	/* Nothing but tables is gathered: all is flushed later. */
	WORK_QUEUED = 1 << 1,
	/* All pages are dirty. */
	WORK_DIRTY = 1 << 2,
	/* Mappings of the last batch stay, to be looked at. */
	WORK_KEEP = 1 << 3,
};

struct work {
	enum kind kind;
	/* Bytes of a page, and pages of one operation. */
	u64 page, count;
	u64 flags;
};

/*
 * Does the work in so many batches, and another one before that is not counted. The table is made
 * anew at the start. An errno; the thousandth parts of nanoseconds of one operation of each batch.
 *
 * EOPNOTSUPP: Linux does not offer this; EBUSY: the pool grew while the clock ran; EILSEQ: what is
 * mapped is not what was asked for; EFAULT: not all was unmapped.
 */
int time_work(const struct operations *operations, const struct config *config,
	      const struct work *work, u64 batches, u64 *samples);

#endif
