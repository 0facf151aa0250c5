// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * VFIO's type 1 and iommufd pin by the entries of the process's page table: what one entry maps is taken by one count of its
 * folio, and a run is charged once. No pointer is stored for a page.
 */
//@ mm/gup.c, at its end
long pin_user_run_remote(struct mm_struct *mm, unsigned long start, unsigned long nr_pages,
			 unsigned int gup_flags, struct page **first);

/* The page table with the entry of @address; NULL where a larger entry is, or none. */
static pmd_t *table_of(struct mm_struct *mm, unsigned long address)
{
	pgd_t *pgd = pgd_offset(mm, address);
	p4d_t *p4d;
	pud_t *pud;

	if (pgd_none_or_clear_bad(pgd))
		return NULL;
	p4d = p4d_offset(pgd, address);
	if (p4d_none_or_clear_bad(p4d))
		return NULL;
	pud = pud_offset(p4d, address);
	if (!pud_present(*pud) || pud_leaf(*pud))
		return NULL;
	return pmd_offset(pud, address);
}

/*
 * Pins what the writable entries of one page table map, as far as it follows @next, if that is not NULL: each folio by one
 * count. Sets @ends where what follows is elsewhere.
 */
static long pin_entries(struct vm_area_struct *vma, unsigned long start, unsigned long nr_pages,
			unsigned int flags, struct page *next, struct page **first, bool *ends)
{
	unsigned long max = min(nr_pages, PTRS_PER_PTE - pte_index(start));
	pmd_t *pmd = table_of(vma->vm_mm, start);
	unsigned long done = 0, count;
	struct folio *folio;
	struct page *page;
	pte_t *ptep, pte;
	spinlock_t *ptl;

	if (!pmd)
		return 0;
	ptep = pte_offset_map_lock(vma->vm_mm, pmd, start, &ptl);
	if (!ptep)
		return 0;
	while (done < max) {
		pte = ptep_get(ptep + done);
		if (!pte_present(pte) || pte_protnone(pte) || !pte_write(pte))
			break;
		page = vm_normal_page(vma, start + (done << PAGE_SHIFT), pte);
		if (!page)
			break;
		if (next && page != next + done) {
			*ends = true;
			break;
		}
		folio = page_folio(page);
		if (!folio_is_longterm_pinnable(folio))
			break;
		count = !folio_test_large(folio) ? 1 :
			folio_pte_batch_flags(folio, NULL, ptep + done, &pte, max - done,
					      FPB_RESPECT_WRITE);
		if (try_grab_folio(folio, count, flags))
			break;
		if (arch_make_folio_accessible(folio)) {
			gup_put_folio(folio, count, flags);
			break;
		}
		if (!folio_test_dirty(folio))
			folio_mark_dirty(folio);
		folio_mark_accessed(folio);
		if (!next) {
			*first = page;
			next = page;
		}
		done += count;
	}
	pte_unmap_unlock(ptep, ptl);
	return done;
}

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
	bool ends = false;
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
		if ((flags & FOLL_WRITE) && !is_vm_hugetlb_page(vma)) {
			count = min(nr_pages - pinned, (vma->vm_end - start) >> PAGE_SHIFT);
			count = pin_entries(vma, start, count, flags,
					    pinned ? *first + pinned : NULL, first, &ends);
			pinned += count;
			start += count << PAGE_SHIFT;
			if (ends)
				break;
			if (count)
				continue;
		}
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
//@ drivers/iommu/iommufd/pages.c, before: struct pfn_reader_user {
long pin_user_run_remote(struct mm_struct *mm, unsigned long start, unsigned long nr_pages,
			 unsigned int gup_flags, struct page **first);

/* Pages for which mmap_lock is held without a break. */
#define MOST_AT_ONCE (1UL << (30 - PAGE_SHIFT))

//@ drivers/iommu/iommufd/pages.c, before: 	/* The following are only valid if file != NULL. */
	/* No other user wants the pages one by one. */
	bool by_run;
	/* upages has the first page only; the others follow it. */
	bool run;

//@ drivers/iommu/iommufd/pages.c, before: 	user->upages_start = 0;
	user->by_run = false;
	user->run = false;
//@ drivers/iommu/iommufd/pages.c, before: static int pfn_reader_user_pin(
static long pin_run(struct pfn_reader_user *user, unsigned long start, unsigned long npages)
{
	struct mm_struct *mm = current->mm;
	long pinned = 0;

	if (user->by_run) {
		mmap_read_lock(mm);
		pinned = pin_user_run_remote(mm, start, min(npages, MOST_AT_ONCE), user->gup_flags,
					     user->upages);
		mmap_read_unlock(mm);
	}
	user->run = pinned > 0;
	return pinned;
}

//@ drivers/iommu/iommufd/pages.c, before: 		/* All undone in pfn_reader_destroy() */
		user->by_run = true;
//@ drivers/iommu/iommufd/pages.c, before: 		rc = pin_user_pages_fast(
		rc = pin_run(user, uptr, last_index - start_index + 1);
		if (!rc)
//@ drivers/iommu/iommufd/pages.c, before: 	start_index -= user->upages_start;
	if (user->run) {
		batch_add_pfn_num(&pfns->batch,
				  page_to_pfn(*user->upages) + start_index - user->upages_start,
				  npages, BATCH_CPU_MEMORY);
		return 0;
	}
//@ drivers/iommu/iommufd/pages.c, before: 			unpin_user_pages(user->upages + start_index, npages);
			if (user->run)
				unpin_user_page_range_dirty_lock(*user->upages + start_index, npages,
								 false);
			else
