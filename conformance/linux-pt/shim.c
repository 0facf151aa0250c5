/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * The pool that tables lie in.
 *
 * The pool is cut into pages. A block is a power of two of them, aligned to its size; its first
 * page's note says so. There are two ways to take a block.
 *
 * From the lowest place that is free: a run of the same requests gives the same addresses, which a
 * comparison wants. It looks at every place below.
 *
 * Recycled: the block of that size that was freed last, as a kernel's allocator gives it, in
 * constant time. Where none is free, the pool grows by a lot of them, which are touched at once, so
 * that no page fault falls into what is timed. They are as dirty as used ones, and a block is
 * zeroed when it is taken, as far as it was asked for.
 */
#include "shim.h"
#include "pool.h"

#include <sys/mman.h>

/* Pages that the pool grows by at least. */
#define LOT 64ul
#define ORDERS 17

char *shim_pool;
uintptr_t shim_offset;
static enum pool_mode mode;
static struct note notes[POOL_PAGES];
static size_t end, taken;
static u64 complaints, grown;
/* The first free block of 2^n pages, plus 1: the others follow by their notes. */
static unsigned int free_blocks[ORDERS];

void shim_complain(void)
{
	complaints++;
}

u64 pool_complaints(void)
{
	u64 count = complaints;

	complaints = 0;
	return count;
}

u64 pool_grown(void)
{
	return grown;
}

void pool_reset(u64 base, enum pool_mode wanted)
{
	if (shim_pool == NULL) {
		/* Aligned, so that a block's place is aligned as its address is. */
		char *memory = mmap(NULL, 2 * POOL_BYTES, PROT_READ | PROT_WRITE,
				    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

		if (memory == MAP_FAILED)
			exit(2);
		shim_pool = (char *)(((uintptr_t)memory + POOL_BYTES - 1) & -(uintptr_t)POOL_BYTES);
	}
	shim_offset = (uintptr_t)shim_pool - base;
	/* Recycled blocks stay what they are, unless a table that failed left some behind. */
	if (mode == wanted && mode != POOL_LOWEST && taken == 0)
		return;
	memset(notes, 0, end * sizeof *notes);
	memset(free_blocks, 0, sizeof free_blocks);
	end = taken = 0;
	mode = wanted;
	/* A machine without huge pages refuses, and small ones do. */
	if (mode == POOL_RECYCLED_HUGE)
		(void)madvise(shim_pool, POOL_BYTES, MADV_HUGEPAGE);
}

const struct note *pool_note(size_t page)
{
	return &notes[page];
}

size_t pool_end(void)
{
	return end;
}

static void *place(size_t page)
{
	return shim_pool + page * PAGE_SIZE;
}

static bool is_free(size_t first, size_t pages)
{
	for (size_t i = 0; i < pages; i++)
		if (notes[first + i].taken)
			return false;
	return true;
}

static void *take_lowest(size_t pages)
{
	for (size_t first = 0; first + pages <= POOL_PAGES; first += pages) {
		if (!is_free(first, pages))
			continue;
		for (size_t i = 0; i < pages; i++)
			notes[first + i].taken = true;
		notes[first].pages = pages;
		end = max(end, first + pages);
		return memset(place(first), 0, pages * PAGE_SIZE);
	}
	return NULL;
}

static void push_free(size_t first, unsigned int order)
{
	notes[first].below = free_blocks[order];
	free_blocks[order] = first + 1;
}

/* Blocks at the pool's end, the lowest of them to be taken first. */
static bool grow(unsigned int order)
{
	size_t pages = 1ul << order, lot = max(pages, LOT);
	size_t first = (end + pages - 1) & -pages;

	if (first + lot > POOL_PAGES)
		return false;
	memset(place(first), 0xff, lot * PAGE_SIZE);
	for (size_t block = first + lot; block > first; block -= pages)
		push_free(block - pages, order);
	end = first + lot;
	grown++;
	return true;
}

static void *take_recycled(size_t pages, size_t bytes)
{
	unsigned int order = ilog2(pages);

	if (order >= ORDERS || (free_blocks[order] == 0 && !grow(order)))
		return NULL;
	size_t first = free_blocks[order] - 1;

	free_blocks[order] = notes[first].below;
	notes[first].pages = pages;
	notes[first].taken = true;
	taken++;
	return memset(place(first), 0, bytes);
}

void *shim_alloc(size_t bytes)
{
	size_t pages = 1;

	while (pages * PAGE_SIZE < bytes)
		pages *= 2;
	return mode == POOL_LOWEST ? take_lowest(pages) : take_recycled(pages, bytes);
}

static struct note *note_of(void *block)
{
	struct note *note = &notes[((char *)block - shim_pool) / PAGE_SIZE];

	/* Blocks given back were given out, and once. */
	if (note->pages == 0)
		exit(3);
	return note;
}

void shim_free(void *block)
{
	if (block == NULL)
		return;
	struct note *note = note_of(block);
	size_t pages = note->pages;

	if (mode != POOL_LOWEST) {
		note->taken = false;
		note->pages = 0;
		taken--;
		push_free(note - notes, ilog2(pages));
		return;
	}
	for (size_t i = pages; i-- > 0;) {
		note[i].taken = false;
		note[i].pages = 0;
	}
}

struct list_head *shim_link(void *block)
{
	return &note_of(block)->link;
}

void iommu_iotlb_sync(struct iommu_domain *domain, struct iommu_iotlb_gather *gather)
{
	(void)domain;
	iommu_put_pages_list(&gather->freelist);
	iommu_iotlb_gather_init(gather);
}

void iommu_pages_list_add(struct iommu_pages_list *list, void *block)
{
	struct list_head *link = shim_link(block);

	link->next = &list->pages;
	link->prev = list->pages.prev;
	link->prev->next = link;
	list->pages.prev = link;
}

void iommu_pages_list_splice(struct iommu_pages_list *from, struct iommu_pages_list *to)
{
	struct list_head *first = from->pages.next, *last = from->pages.prev;

	if (iommu_pages_list_empty(from))
		return;
	last->next = to->pages.next;
	last->next->prev = last;
	first->prev = &to->pages;
	to->pages.next = first;
}

void iommu_put_pages_list(struct iommu_pages_list *list)
{
	struct list_head *link = list->pages.next;

	while (link != &list->pages) {
		struct note *note = container_of(link, struct note, link);

		link = link->next;
		shim_free(place(note - notes));
	}
	INIT_LIST_HEAD(&list->pages);
}

void iova_bitmap_set(struct iova_bitmap *bitmap, u64 iova, size_t bytes)
{
	u64 bit = (iova - bitmap->first) >> bitmap->shift;
	u64 last = (iova - bitmap->first + bytes - 1) >> bitmap->shift;

	for (; bit <= last; bit++)
		set_bit(bit % BITS_PER_LONG, &bitmap->words[bit / BITS_PER_LONG]);
}
