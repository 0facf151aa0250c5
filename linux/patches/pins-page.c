// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * VFIO's type 1 as it was before pages that follow each other were found and counted together: each by itself, when they
 * are pinned and when they are unpinned.
 */
//@ drivers/vfio/vfio_iommu_type1.c, before: #define DRIVER_VERSION
static inline size_t one_page(struct page **pages, size_t count)
{
	return 1;
}
#define num_pages_contiguous one_page
//@ drivers/vfio/vfio_iommu_type1.c, before: static inline void put_valid_unreserved_pfns(
static void put_pfns(unsigned long pfn, unsigned long count, int prot)
{
	for (; count; count--)
		put_pfn(pfn++, prot);
}
#define unpin_user_page_range_dirty_lock(page, count, prot) put_pfns(page_to_pfn(page), count, prot)
