/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * The pool that tables lie in.
 *
 * The pool is cut into pages. A block is a power of two of them, aligned to its size; its first
 * page's note says so. Blocks are taken from the lowest place that is free, so that a run of the
 * same requests gives the same addresses.
 */
#include "shim.h"
#include "pool.h"

#include <sys/mman.h>

char *shim_pool;
u64 shim_base;
static struct note notes[POOL_PAGES];
static size_t end;
static u64 complaints;

bool shim_complain(bool condition)
{
	complaints += condition;
	return condition;
}

u64 pool_complaints(void)
{
	u64 count = complaints;

	complaints = 0;
	return count;
}

void pool_reset(u64 base)
{
	if (shim_pool == NULL) {
		/* Aligned, so that a block's place is aligned as its address is. */
		char *memory = mmap(NULL, 2 * POOL_BYTES, PROT_READ | PROT_WRITE,
				    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

		if (memory == MAP_FAILED)
			exit(2);
		shim_pool = (char *)(((uintptr_t)memory + POOL_BYTES - 1) & -(uintptr_t)POOL_BYTES);
	}
	memset(notes, 0, end * sizeof *notes);
	end = 0;
	shim_base = base;
}

const struct note *pool_note(size_t page)
{
	return &notes[page];
}

size_t pool_end(void)
{
	return end;
}

static bool is_free(size_t first, size_t pages)
{
	for (size_t i = 0; i < pages; i++)
		if (notes[first + i].taken)
			return false;
	return true;
}

void *shim_alloc(size_t bytes)
{
	size_t pages = 1;

	while (pages * PAGE_SIZE < bytes)
		pages *= 2;
	for (size_t first = 0; first + pages <= POOL_PAGES; first += pages) {
		if (!is_free(first, pages))
			continue;
		for (size_t i = 0; i < pages; i++)
			notes[first + i].taken = true;
		notes[first].pages = pages;
		end = max(end, first + pages);
		return memset(shim_pool + first * PAGE_SIZE, 0, pages * PAGE_SIZE);
	}
	return NULL;
}

static struct note *note_of(void *block)
{
	struct note *note = &notes[((char *)block - shim_pool) / PAGE_SIZE];

	/* What is given back was given out, and once. */
	if (note->pages == 0)
		exit(3);
	return note;
}

void shim_free(void *block)
{
	if (block == NULL)
		return;
	struct note *note = note_of(block);

	for (size_t i = note->pages; i-- > 0;) {
		note[i].taken = false;
		note[i].pages = 0;
	}
}

struct list_head *shim_link(void *block)
{
	return &note_of(block)->link;
}

/* The empty entry leads nowhere, but Linux computes where that would be. */
void *phys_to_virt(u64 address)
{
	return shim_pool + (address - shim_base);
}

void iommu_iotlb_gather_init(struct iommu_iotlb_gather *gather)
{
	memset(gather, 0, sizeof *gather);
	INIT_LIST_HEAD(&gather->freelist.pages);
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
		shim_free(shim_pool + (size_t)(note - notes) * PAGE_SIZE);
	}
	INIT_LIST_HEAD(&list->pages);
}
