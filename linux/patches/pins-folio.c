// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * VFIO's type 1 that pins by the entries of the process's page table: what one entry maps is taken by one count of its
 * folio, and a run is charged once. No pointer is stored for a page.
 */
//@ mm/gup.c, at its end
long pin_user_run_remote(struct mm_struct *mm, unsigned long start, unsigned long nr_pages,
			 unsigned int gup_flags, struct page **first);

/**
 * pin_user_run_remote() - pin pages that follow each other in memory
 * @mm: whose
 * @start: address of the first
 * @nr_pages: how many at most
 * @gup_flags: FOLL_LONGTERM, and FOLL_WRITE if they are to be written to
 * @first: the first page
 *
 * As pin_user_pages_remote(), without an array of pages: what is pinned are @first and those that follow it, which
 * unpin_user_page_range_dirty_lock() releases. mmap_lock is held for reading, and stays held. Pages that would have to be
 * migrated end the run, as does what is no page; a run of none is left to pin_user_pages_remote(), which migrates, and says
 * what is wrong.
 *
 * Return: how many pages are pinned.
 */
long pin_user_run_remote(struct mm_struct *mm, unsigned long start, unsigned long nr_pages,
			 unsigned int gup_flags, struct page **first)
{
	unsigned int flags = gup_flags | FOLL_PIN | FOLL_TOUCH | FOLL_REMOTE;
	unsigned int saved = memalloc_pin_save();
	unsigned long mask, count, pinned = 0;
	struct vm_area_struct *vma = NULL;
	struct folio *folio;
	struct page *page;
	int locked = 1;

	mm_set_has_pinned_flag(mm);
	start = untagged_addr_remote(mm, start);
	while (pinned < nr_pages) {
		if (!vma || start >= vma->vm_end) {
			vma = vma_lookup(mm, start);
			if (!vma || check_vma_flags(vma, flags))
				break;
		}
		cond_resched();
		mask = 0;
		page = follow_page_mask(vma, start, flags, &mask);
		if (!page || PTR_ERR(page) == -EMLINK) {
			if (fatal_signal_pending(current) ||
			    faultin_page(vma, start, flags, !!page, &locked))
				break;
			continue;
		}
		if (IS_ERR(page))
			break;
		folio = page_folio(page);
		count = min(1 + (~(start >> PAGE_SHIFT) & mask), nr_pages - pinned);
		/* The reference that the look-up took is the first of them. */
		if ((pinned && page != *first + pinned) || !folio_is_longterm_pinnable(folio) ||
		    (count > 1 && try_grab_folio(folio, count - 1, flags))) {
			gup_put_folio(folio, 1, flags);
			break;
		}
		if (!pinned)
			*first = page;
		pinned += count;
		start += count << PAGE_SHIFT;
	}
	memalloc_pin_restore(saved);
	return pinned;
}
//@ drivers/vfio/vfio_iommu_type1.c, before: static inline void put_valid_unreserved_pfns(
long pin_user_run_remote(struct mm_struct *mm, unsigned long start, unsigned long nr_pages,
			 unsigned int gup_flags, struct page **first);

/* Pages for which mmap_lock is held without a break. */
#define MOST_AT_ONCE (1UL << (30 - PAGE_SHIFT))

static long pin_run(struct vfio_dma *dma, unsigned long vaddr, unsigned long npage,
		    unsigned long *pfn_base, unsigned long limit, struct vfio_batch *batch)
{
	unsigned int flags = FOLL_LONGTERM | (dma->prot & IOMMU_WRITE ? FOLL_WRITE : 0);
	dma_addr_t iova = vaddr - dma->vaddr + dma->iova;
	struct mm_struct *mm = current->mm;
	long pinned = 0, charged;
	struct page *first;
	int ret;

	/* Pages that Linux has pinned already come first. */
	if (mm && !batch->size && !disable_hugepages) {
		mmap_read_lock(mm);
		pinned = pin_user_run_remote(mm, vaddr, min(npage, MOST_AT_ONCE), flags, &first);
		mmap_read_unlock(mm);
	}
	if (!pinned)
		return vfio_pin_pages_remote(dma, vaddr, npage, pfn_base, limit, batch);
	charged = pinned - vpfn_pages(dma, iova, pinned);
	if (charged && !dma->lock_cap && mm->locked_vm + charged > limit)
		ret = -ENOMEM;
	else
		ret = vfio_lock_acct(dma, charged, false);
	if (ret) {
		unpin_user_page_range_dirty_lock(first, pinned, false);
		return ret;
	}
	*pfn_base = page_to_pfn(first);
	return pinned;
}
#define vfio_pin_pages_remote pin_run
