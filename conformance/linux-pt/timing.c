/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * Times work of Linux's tables: the loops are those of generic.c and pgtable.c, and the clock is
 * read around a whole batch of equal operations. What an empty bracket of two readings takes is
 * subtracted.
 *
 * Where and how often:
 *
 *   one page          64 operations, at every second page
 *   up to 512 pages    8 operations, each at the start of a table of the page's level
 *   more               1 operation
 *
 * all from IOVA on; every operation maps the same addresses from PA on. A page below IOVA keeps the
 * upper tables alive. Tables of 32 bits have no such addresses, and use lower ones.
 *
 * Work around an operation (undoing it for the next batch, making pages dirty) is not timed, nor
 * is the first batch, which brings tables, caches and the pool into the state that lasts.
 */
#include "timing.h"
#include "pool.h"

#include <time.h>

#define IOVA (8ull << 30)
#define PA (16ull << 30)
#define NARROW_IOVA (1ull << 30)
#define NARROW_PA (2ull << 30)

#define CHOSEN_BYTES (1ull << 20)
#define LARGE_BYTES (1ull << 30)
#define TRANSLATIONS 4096

/* One request under way. */
struct run {
	const struct operations *operations;
	const struct config *config;
	const struct work *work;
	/* The smallest page, and bits of an index into a table of the lowest level. */
	unsigned int granule_log2, index_log2;
	/* Bytes that a table of the page's level spans. */
	u64 span;
	struct batch batch;
	u64 iovas[TRANSLATIONS];
	unsigned long dirty[LARGE_BYTES / PAGE_SIZE / BITS_PER_LONG];
};

static u64 now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return (u64)time.tv_sec * 1000000000 + time.tv_nsec;
}

static int ascending(const void *a, const void *b)
{
	u64 first = *(const u64 *)a, second = *(const u64 *)b;

	return first < second ? -1 : first > second;
}

/* The median of empty brackets. */
static u64 bracket(void)
{
	static u64 cost;
	static u64 samples[10001];
	const size_t count = sizeof samples / sizeof *samples;

	if (cost != 0)
		return cost;
	for (size_t i = 0; i < count; i++) {
		u64 start = now();

		samples[i] = now() - start;
	}
	qsort(samples, count, sizeof *samples, ascending);
	cost = samples[count / 2];
	return cost;
}

static bool narrow(const struct config *config)
{
	return config->input_bits <= 32;
}

static u64 first_iova(const struct config *config)
{
	return narrow(config) ? NARROW_IOVA : IOVA;
}

static u64 first_address(const struct config *config)
{
	return narrow(config) ? NARROW_PA : PA;
}

/* The table as it was made. */
static void make_anew(const struct run *run)
{
	run->operations->destroy();
	/* The server goes on with this table, so there must be one. */
	if (run->operations->create(run->config) != 0)
		exit(4);
}

/* The same with a page below IOVA, and then only for pages of the size that is wanted. */
static int renew(const struct run *run)
{
	u64 page = 1ull << run->granule_log2;

	make_anew(run);
	int result = run->operations->map(first_iova(run->config) - page,
					  first_address(run->config), page, TIMED_PROT);

	if (!run->batch.chosen)
		run->operations->restrict_sizes(run->batch.page);
	return result;
}

/* Geometry of the tables, which the sizes of their pages tell while all are allowed. */
static void measure(struct run *run)
{
	struct geometry geometry;
	u64 page = run->work->page;

	run->operations->geometry(&geometry);
	run->granule_log2 = __ffs64(geometry.page_sizes);
	/* Entries of 8 bytes fill a granule; those of 4 bytes, a quarter of it. */
	run->index_log2 = run->granule_log2 - (run->config->format == ARM_SHORT ? 4 : 3);
	run->span = 1ull << (run->granule_log2 + run->index_log2);
	while (run->span <= page)
		run->span <<= run->config->format == ARM_SHORT ? 12 : run->index_log2;
}

static void shape(struct run *run)
{
	const struct work *work = run->work;
	struct batch *batch = &run->batch;
	u64 room = run->config->input_bits >= 64 ? ~0ull : 1ull << run->config->input_bits;

	batch->iova = first_iova(run->config);
	batch->address = first_address(run->config);
	batch->page = work->page;
	batch->count = work->count;
	batch->queued = work->flags & WORK_QUEUED;
	batch->chosen = false;
	if (work->kind == WORK_MAP_CHOSEN || work->kind == WORK_UNMAP_CHOSEN) {
		batch->chosen = true;
		batch->page = 1ull << run->granule_log2;
		batch->count = CHOSEN_BYTES / batch->page;
	} else if (work->kind == WORK_TRANSLATE || work->kind == WORK_HARVEST) {
		batch->count = max(LARGE_BYTES / batch->page, 1ull);
	}
	u64 bytes = batch->count * batch->page;

	batch->operations = 1;
	batch->stride = bytes;
	if (work->kind == WORK_TRANSLATE || work->kind == WORK_HARVEST)
		return;
	if (batch->count == 1) {
		batch->operations = 64;
		batch->stride = 2 * batch->page;
	} else if (batch->count <= 512) {
		/* One and the same stride where a run fills its table, or spans several. */
		batch->stride = max(run->span, bytes);
		if (batch->chosen)
			batch->stride = max(batch->stride, 2 * bytes);
		batch->operations = min((room - batch->iova) / batch->stride, 8ull);
		batch->operations = max(batch->operations, 1u);
	}
}

/* Where `batch` lies, in steps of the stride: pages between, or the rest of the tables. */
static struct batch beside(const struct run *run)
{
	struct batch other = run->batch;
	u64 bytes = other.count * other.page, half = max(other.stride / 2, bytes);

	if (other.operations == 1 || half >= other.stride) {
		other.operations = 0;
		return other;
	}
	other.iova += half;
	other.address += half;
	other.count = (other.stride - half) / other.page;
	return other;
}

/*
 * Unmaps the batch. Linux gives back a table that one call covers whole; two calls for its halves
 * keep it.
 */
static int undo(const struct run *run)
{
	struct batch piece = run->batch;
	u64 half = run->span / 2 / piece.page;
	/* A page of a size that Linux chose cannot be halved, and fills no table. */
	u64 pages = piece.chosen ? piece.count : max(half, 1ull);

	for (u64 done = 0; done < run->batch.count; done += piece.count) {
		piece.iova = run->batch.iova + done * piece.page;
		piece.count = min(pages, run->batch.count - done);
		int result = run->operations->unmap_batch(&piece);

		if (result != 0)
			return result;
	}
	return 0;
}

/* The first and the last byte of every operation lead to where they should, or nowhere. */
static int look(const struct run *run, bool mapped)
{
	const struct batch *batch = &run->batch;
	u64 last = batch->count * batch->page - 1, iova = batch->iova;

	for (unsigned int i = 0; i < batch->operations; i++, iova += batch->stride) {
		u64 expected = mapped ? batch->address : 0;

		if (run->operations->translate(iova) != expected ||
		    run->operations->translate(iova + last) != (mapped ? expected + last : 0))
			return EILSEQ;
	}
	return 0;
}

/* Where the unit says that a page was written, and what the bit is then. */
struct dirty_bit {
	u64 bit;
	bool set;
};

static struct dirty_bit dirty_bit(enum format format)
{
	switch (format) {
	case AMD_V1:
	case AMD_V1_GROWING:
		return (struct dirty_bit){ BIT_ULL(6), true };
	case VTD_SS:
		return (struct dirty_bit){ BIT_ULL(9), true };
	default:
		/* Arm: AP[2], which the unit clears. */
		return (struct dirty_bit){ BIT_ULL(7), false };
	}
}

/* Does what a unit does when each page is written. */
static void make_dirty(const struct run *run)
{
	struct dirty_bit dirty = dirty_bit(run->config->format);
	const struct batch *batch = &run->batch;
	unsigned int low = run->granule_log2, bits = run->index_log2, top = 0;
	struct geometry geometry;

	run->operations->geometry(&geometry);
	while (low + bits * (top + 1) < run->config->input_bits)
		top++;
	for (u64 i = 0; i < batch->count; i++) {
		u64 iova = batch->iova + i * batch->page, table = geometry.root[0];
		u64 *entry = NULL;

		for (unsigned int level = top;; level--) {
			u64 size = 1ull << (low + bits * level);
			u64 index = iova / size % (1ull << bits);

			entry = (u64 *)phys_to_virt(table) + index;
			if (size <= batch->page)
				break;
			table = *entry & GENMASK_ULL(47, low);
		}
		*entry = dirty.set ? *entry | dirty.bit : *entry & ~dirty.bit;
	}
}

static u64 count_dirty(const struct run *run)
{
	u64 count = 0;

	for (size_t i = 0; i < ARRAY_SIZE(run->dirty); i++)
		count += __builtin_popcountl(run->dirty[i]);
	return count;
}

static void choose_iovas(struct run *run)
{
	u64 x = 88172645463325252ull;

	for (size_t i = 0; i < TRANSLATIONS; i++) {
		x ^= x << 13;
		x ^= x >> 7;
		x ^= x << 17;
		run->iovas[i] = run->batch.iova + x % LARGE_BYTES;
	}
}

/*
 * One batch: its time goes to `sample`. What one kind needs before it, it finds or makes; `first`
 * is the batch that is not counted, in which everything is looked at.
 */
static int map(struct run *run, bool first, u64 *sample)
{
	u64 start = now();
	int result = run->operations->map_batch(&run->batch);

	*sample = now() - start;
	return result != 0 || !first ? result : look(run, true);
}

/* Where tables are to go, the caller chooses the sizes, as Linux's core does. */
static int unmap(struct run *run, bool tables, bool first, u64 *sample)
{
	struct batch batch = run->batch;

	batch.chosen = batch.chosen || tables;
	u64 start = now();
	int result = run->operations->unmap_batch(&batch);

	*sample = now() - start;
	return result != 0 || !first ? result : look(run, false);
}

static int cycle(struct run *run, bool first, u64 *sample)
{
	if (first) {
		int result = map(run, first, sample);

		return result != 0 ? result : unmap(run, true, first, sample);
	}
	u64 start = now();
	int result = run->operations->cycle_batch(&run->batch);

	*sample = now() - start;
	return result;
}

static int translate(struct run *run, u64 *sample)
{
	u64 expected = TRANSLATIONS * (run->batch.address - run->batch.iova);
	u64 start = now();
	u64 sum = run->operations->translate_all(run->iovas, TRANSLATIONS);

	*sample = now() - start;
	for (size_t i = 0; i < TRANSLATIONS; i++)
		expected += run->iovas[i];
	return sum == expected ? 0 : EILSEQ;
}

static int harvest(struct run *run, u64 *sample)
{
	const struct batch *batch = &run->batch;
	struct iova_bitmap bitmap = { batch->iova, __ffs64(batch->page), run->dirty };
	bool dirty = run->work->flags & WORK_DIRTY;

	if (dirty)
		make_dirty(run);
	memset(run->dirty, 0, sizeof run->dirty);
	u64 start = now();
	int result = run->operations->harvest(batch->iova, batch->count * batch->page, &bitmap);

	*sample = now() - start;
	if (result == 0 && count_dirty(run) != (dirty ? batch->count : 0))
		return EILSEQ;
	return result;
}

static int one_batch(struct run *run, bool first, bool last, u64 *sample)
{
	bool keep = last && (run->work->flags & WORK_KEEP);
	int result = 0;
	u64 ignored;

	switch (run->work->kind) {
	case WORK_MAP:
	case WORK_MAP_CHOSEN:
		result = map(run, first, sample);
		return result != 0 || keep ? result : undo(run);
	case WORK_UNMAP:
	case WORK_UNMAP_CHOSEN:
	case WORK_UNMAP_ALLOCATED:
		result = map(run, first, &ignored);
		if (result != 0 || keep)
			return result;
		return unmap(run, run->work->kind == WORK_UNMAP_ALLOCATED, first, sample);
	case WORK_MAP_ALLOCATED:
		result = renew(run);
		return result != 0 ? result : map(run, first, sample);
	case WORK_CYCLE:
		return cycle(run, first, sample);
	case WORK_TRANSLATE:
		return translate(run, sample);
	default:
		return harvest(run, sample);
	}
}

/* State before the first batch. */
static int prepare(struct run *run)
{
	int result = renew(run);
	u64 ignored;

	if (result == 0 && (run->work->flags & WORK_HALF)) {
		struct batch other = beside(run);

		result = run->operations->map_batch(&other);
	}
	if (result != 0)
		return result;
	if (run->work->kind == WORK_TRANSLATE || run->work->kind == WORK_HARVEST) {
		result = map(run, true, &ignored);
		choose_iovas(run);
	}
	if (result == 0 && run->work->kind == WORK_HARVEST) {
		struct iova_bitmap bitmap = { run->batch.iova, __ffs64(run->batch.page),
					      run->dirty };

		/* Linux's leaves may be born dirty. */
		result = run->operations->harvest(
			run->batch.iova, run->batch.count * run->batch.page, &bitmap);
	}
	return result;
}

int time_work(const struct operations *operations, const struct config *config,
	      const struct work *work, u64 batches, u64 *samples)
{
	static struct run run;
	u64 cost = bracket(), ignored = 0;

	run.operations = operations;
	run.config = config;
	run.work = work;
	if (work->kind > WORK_HARVEST || work->page == 0 || (work->page & (work->page - 1)) != 0 ||
	    work->count == 0)
		return EINVAL;
	make_anew(&run);
	measure(&run);
	shape(&run);
	int result = prepare(&run);

	if (result == 0)
		result = one_batch(&run, true, false, &ignored);
	u64 grown = pool_grown();

	for (u64 i = 0; i < batches && result == 0; i++) {
		u64 time = 0;

		result = one_batch(&run, false, i + 1 == batches, &time);
		u64 operations_timed =
			work->kind == WORK_TRANSLATE ? TRANSLATIONS : run.batch.operations;

		samples[i] = (time > cost ? time - cost : 0) * 1000 / operations_timed;
	}
	if (result == 0 && pool_grown() != grown)
		result = EBUSY;
	return result;
}
