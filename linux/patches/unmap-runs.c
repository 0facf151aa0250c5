// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * An unmap that returns the physical runs that it has removed, and a map of many runs in one walk: operations of a domain
 * beside unmap_range and map_range. VFIO's type 1 and iommufd flush, then unpin by runs, and reschedule between batches.
 * Domains without the operations keep the way of today, an iommu_iova_to_phys() for each page.
 */
//@ include/linux/iommu.h, before: extern size_t iommu_unmap(struct iommu_domain *domain, unsigned long iova,
#define IOMMU_UNMAP_RUNS

/**
 * struct iommu_run - memory that is contiguous
 * @phys: its first byte
 * @len: bytes
 */
struct iommu_run {
	u64 phys;
	u64 len;
};

/**
 * struct iommu_runs - receiver of what an unmap removes
 * @add: takes the next run, in order of device addresses and without a gap between them
 * @room: runs at most
 * @most: bytes at most, unless the first leaf is larger
 */
struct iommu_runs {
	void (*add)(struct iommu_runs *runs, phys_addr_t phys, size_t len);
	size_t room;
	size_t most;
};

bool iommu_has_runs(struct iommu_domain *domain);
size_t iommu_unmap_runs(struct iommu_domain *domain, unsigned long iova, size_t size,
			struct iommu_iotlb_gather *gather, struct iommu_runs *runs);
int iommu_map_runs(struct iommu_domain *domain, unsigned long iova, const struct iommu_run *runs,
		   unsigned int count, int prot, gfp_t gfp);
//@ include/linux/generic_pt/iommu.h, before: struct pt_iommu_ops {
struct iommu_run;
struct iommu_runs;

//@ include/linux/generic_pt/iommu.h, before: 	 * @set_dirty: Make the iova write dirty
	 * @unmap_runs: Make entries empty and return what they mapped
	 * @iommu_table: Table to manipulate
	 * @iova: IO virtual address to start
	 * @len: Length of the range starting from @iova
	 * @iotlb_gather: Gather struct that must be flushed before the memory is used again
	 * @runs: Receives the runs, and says how much it has room for
	 *
	 * As unmap_range(), but it ends where @runs is full or has its bytes. Whole leaves go, one
	 * at least.
	 *
	 * Context: The caller must hold a write range lock that includes
	 * the whole range.
	 *
	 * Returns: Number of bytes of VA unmapped, which are those of the runs.
	 */
	size_t (*unmap_runs)(struct pt_iommu *iommu_table, dma_addr_t iova, dma_addr_t len,
			     struct iommu_iotlb_gather *iotlb_gather, struct iommu_runs *runs);

	/**
	 * @map_runs: Install translations for runs of memory, one behind the other
	 * @iommu_table: Table to manipulate
	 * @iova: IO virtual address of the first
	 * @runs: The runs, each of whole pages
	 * @count: How many, one at least
	 * @prot: A bitmap of IOMMU_READ/WRITE/CACHE/NOEXEC/MMIO
	 * @gfp: GFP flags for any memory allocations
	 *
	 * As map_range(), for all of them in one walk. Optional.
	 *
	 * Context: The caller must hold a write range lock that includes
	 * the whole range.
	 *
	 * Returns: -ERRNO on failure, with nothing mapped, 0 on success.
	 */
	int (*map_runs)(struct pt_iommu *iommu_table, dma_addr_t iova, const struct iommu_run *runs,
			unsigned int count, unsigned int prot, gfp_t gfp);

	/**
//@ drivers/iommu/iommu.c, at its end

/**
 * iommu_has_runs() - whether iommu_unmap_runs() may be called
 * @domain: the domain
 */
bool iommu_has_runs(struct iommu_domain *domain)
{
	struct pt_iommu *pt = iommupt_from_domain(domain);

	return pt && pt->ops->unmap_runs;
}
EXPORT_SYMBOL_GPL(iommu_has_runs);

/**
 * iommu_unmap_runs() - unmap, and return the memory that was mapped
 * @domain: a domain of which iommu_has_runs() is true
 * @iova: IO virtual address to start
 * @size: bytes at most; leaves do not reach over its end
 * @gather: what has to be flushed before the memory of @runs is used again
 * @runs: receives the runs
 *
 * Return: bytes of IOVA unmapped, from @iova on: those of the runs. Less than @size where @runs is full or has its bytes, or
 * at a hole; 0 if there is one at @iova.
 */
size_t iommu_unmap_runs(struct iommu_domain *domain, unsigned long iova, size_t size,
			struct iommu_iotlb_gather *gather, struct iommu_runs *runs)
{
	struct pt_iommu *pt = iommupt_from_domain(domain);
	size_t unmapped;

	iommu_debug_unmap_begin(domain, iova, size);
	unmapped = pt->ops->unmap_runs(pt, iova, size, gather, runs);
	trace_unmap(iova, size, unmapped);
	iommu_debug_unmap_end(domain, iova, size, unmapped);
	return unmapped;
}
EXPORT_SYMBOL_GPL(iommu_unmap_runs);

/**
 * iommu_map_runs() - map runs of memory, one behind the other
 * @domain: the domain
 * @iova: IO virtual address of the first
 * @runs: the runs, each of whole pages
 * @count: how many, one at least
 * @prot: as of iommu_map()
 * @gfp: as of iommu_map()
 *
 * Return: 0, or an error, with nothing mapped.
 */
int iommu_map_runs(struct iommu_domain *domain, unsigned long iova, const struct iommu_run *runs,
		   unsigned int count, int prot, gfp_t gfp)
{
	struct pt_iommu *pt = iommupt_from_domain(domain);
	unsigned int i;
	size_t mapped = 0;
	int ret = 0;

	if (pt && pt->ops->map_runs) {
		might_sleep_if(gfpflags_allow_blocking(gfp));
		ret = pt->ops->map_runs(pt, iova, runs, count, prot, gfp);
		if (ret)
			return ret;
		for (i = 0; i < count; i++) {
			trace_map(iova + mapped, runs[i].phys, runs[i].len);
			iommu_debug_map(domain, runs[i].phys, runs[i].len);
			mapped += runs[i].len;
		}
	} else {
		for (i = 0; i < count && !ret; i++) {
			ret = iommu_map_nosync(domain, iova + mapped, runs[i].phys, runs[i].len,
					       prot, gfp);
			mapped += ret ? 0 : runs[i].len;
		}
	}
	if (!ret)
		ret = iommu_sync_map(domain, iova, mapped);
	if (ret && mapped)
		iommu_unmap(domain, iova, mapped);
	return ret;
}
EXPORT_SYMBOL_GPL(iommu_map_runs);
//@ drivers/iommu/generic_pt/iommu_pt.h, before: 	pt_vaddr_t unmapped;
	/* NULL if nothing is wanted of what the leaves map. */
	struct iommu_runs *runs;
	/* The run that may go on, and the runs and bytes so far, it included. */
	struct iommu_run run;
	size_t count;
	size_t bytes;
//@ drivers/iommu/generic_pt/iommu_pt.h, before: static __maybe_unused int __unmap_range(
/* Takes a leaf that is about to be cleared; false if there is no more room. */
static bool unmap_takes(struct pt_unmap_args *unmap, const struct pt_state *pts)
{
	u64 len = log2_to_int(pt_entry_oa_lg2sz(pts)), phys = pt_entry_oa(pts);
	struct iommu_runs *runs = unmap->runs;

	if (unmap->bytes && unmap->bytes + len > runs->most)
		return false;
	if (!unmap->bytes || phys != unmap->run.phys + unmap->run.len) {
		if (unmap->bytes) {
			if (unmap->count >= runs->room)
				return false;
			runs->add(runs, unmap->run.phys, unmap->run.len);
		}
		unmap->run = (struct iommu_run){ .phys = phys };
		unmap->count++;
	}
	unmap->run.len += len;
	unmap->bytes += len;
	return true;
}

/* A table of leaves that has room only in part is begun by the next call, which then frees it. */
static bool unmap_ends_before(struct pt_unmap_args *unmap, const struct pt_state *pts)
{
	u64 len = log2_to_int(pt_table_item_lg2sz(pts));

	return pts->level == 1 && unmap->bytes &&
	       (unmap->bytes + len > unmap->runs->most ||
		unmap->count + log2_to_int(PT_TABLEMEM_LG2SZ) / PT_ITEM_WORD_SIZE > unmap->runs->room);
}

//@ drivers/iommu/generic_pt/iommu_pt.h, before: 			ret = pt_descend(&pts, arg, __unmap_range);
			if (unmap->runs && unmap_ends_before(unmap, &pts)) {
				ret = -ENOSPC;
				break;
			}
//@ drivers/iommu/generic_pt/iommu_pt.h, before: 			num_contig_lg2 = pt_entry_num_contig_lg2(&pts);
			if (unmap->runs && !unmap_takes(unmap, &pts)) {
				ret = -ENOSPC;
				break;
			}
//@ drivers/iommu/generic_pt/iommu_pt.h, before: static void NS(get_info)
static size_t NS(unmap_runs)(struct pt_iommu *iommu_table, dma_addr_t iova, dma_addr_t len,
			     struct iommu_iotlb_gather *iotlb_gather, struct iommu_runs *runs)
{
	struct pt_unmap_args unmap = {
		.pending.iotlb_gather = iotlb_gather,
		.pending.free_list = IOMMU_PAGES_LIST_INIT(
			unmap.pending.free_list),
		.runs = runs,
	};
	struct pt_range range;

	if (make_range(common_from_iommu(iommu_table), &range, iova, len))
		return 0;

	pt_walk_range(&range, __unmap_range, &unmap);
	if (!unmap.bytes)
		return 0;
	runs->add(runs, unmap.run.phys, unmap.run.len);
	gather_range_pending(&unmap.pending, iommu_table, iova, unmap.unmapped);

	return unmap.unmapped;
}

//@ drivers/iommu/generic_pt/iommu_pt.h, before: 	.get_info = NS(get_info),
	.unmap_runs = NS(unmap_runs),
//@ drivers/vfio/vfio_iommu_type1.c, before: static size_t unmap_unpin_fast(struct vfio_domain *domain,
/* Runs and bytes that are unmapped by one flush, and pages that are unpinned without rescheduling. */
#define MOST_RUNS (2 * VFIO_IOMMU_TLB_SYNC_MAX)
#define MOST_UNMAPPED SZ_1G
#define MOST_UNPINNED (SZ_256M >> PAGE_SHIFT)

struct vfio_runs {
	struct iommu_runs runs;
	unsigned int count;
	struct iommu_run run[MOST_RUNS];
};

static void vfio_add_run(struct iommu_runs *runs, phys_addr_t phys, size_t len)
{
	struct vfio_runs *taken = container_of(runs, struct vfio_runs, runs);

	taken->run[taken->count++] = (struct iommu_run){ .phys = phys, .len = len };
}

/* Unmaps from the beginning on, where the domain returns runs. Returns the bytes that are done. */
static size_t unmap_unpin_runs(struct vfio_domain *domain, struct vfio_dma *dma, long *unlocked)
{
	struct iommu_iotlb_gather gather;
	struct vfio_runs *taken;
	size_t pos = 0, unmapped;
	unsigned int i;

	if (!iommu_has_runs(domain->domain))
		return 0;
	taken = kmalloc(sizeof(*taken), GFP_KERNEL);
	if (!taken)
		return 0;
	taken->runs = (struct iommu_runs){
		.add = vfio_add_run,
		.room = MOST_RUNS,
		.most = MOST_UNMAPPED,
	};
	for (; pos < dma->size; pos += unmapped) {
		dma_addr_t iova = dma->iova + pos;

		taken->count = 0;
		iommu_iotlb_gather_init(&gather);
		unmapped = iommu_unmap_runs(domain->domain, iova, dma->size - pos, &gather,
					    &taken->runs);
		if (!unmapped)
			break;
		iommu_iotlb_sync(domain->domain, &gather);
		for (i = 0; i < taken->count; i++) {
			unsigned long pfn = taken->run[i].phys >> PAGE_SHIFT;
			unsigned long left = taken->run[i].len >> PAGE_SHIFT, n;

			for (; left; left -= n, pfn += n, iova += n << PAGE_SHIFT) {
				n = min(left, MOST_UNPINNED);
				*unlocked += vfio_unpin_pages_remote(dma, iova, pfn, n, false);
				cond_resched();
			}
		}
	}
	kfree(taken);
	return pos;
}

//@ drivers/vfio/vfio_iommu_type1.c, before: 	iommu_iotlb_gather_init(&iotlb_gather);
	pos = unmap_unpin_runs(domain, dma, &unlocked);
//@ drivers/iommu/iommufd/pages.c, before: static struct page **raw_pages_from_domain(
/* Bytes that are unmapped by one flush. */
#define MOST_UNMAPPED SZ_1G

/* Receives the runs of an unmap. */
struct batch_runs {
	struct iommu_runs runs;
	struct pfn_batch *batch;
	/* Pages in front that are not wanted. */
	unsigned long skip;
};

static void batch_add_run(struct iommu_runs *runs, phys_addr_t phys, size_t len)
{
	struct batch_runs *into = container_of(runs, struct batch_runs, runs);
	unsigned long pfn = PHYS_PFN(phys);
	unsigned long nr = PHYS_PFN(phys + len - 1) - pfn + 1;
	unsigned long skipped = min(into->skip, nr);

	into->skip -= skipped;
	if (nr > skipped)
		WARN_ON(!batch_add_pfn_num(into->batch, pfn + skipped, nr - skipped,
					   BATCH_CPU_MEMORY));
}

/*
 * Unmaps from @index on: as much as the batch has room for, but not beyond @last_index unless a leaf reaches over it. Pages
 * from @start_index on go into the batch. Returns the index behind what is unmapped.
 */
static unsigned long batch_unmap_from_domain(struct pfn_batch *batch, struct iommu_domain *domain,
					     struct iopt_area *area, unsigned long index,
					     unsigned long start_index, unsigned long last_index,
					     unsigned long real_last_index)
{
	unsigned long iova = iopt_area_index_to_iova(area, index);
	size_t size = iopt_area_index_to_iova_last(area, real_last_index) - iova + 1;
	size_t most = iopt_area_index_to_iova_last(area, last_index) - iova + 1;
	struct batch_runs into = {
		.runs = { batch_add_run, batch->array_size - batch->end,
			  min_t(size_t, most, MOST_UNMAPPED) },
		.batch = batch,
		.skip = start_index > index ? start_index - index : 0,
	};
	struct iommu_iotlb_gather gather;
	size_t done, part;

	iommu_iotlb_gather_init(&gather);
	done = iommu_unmap_runs(domain, iova, size, &gather, &into.runs);
	/* Leaves may be smaller than pages: the last page goes whole. */
	part = (iova + done - iopt_area_iova(area) + area->page_offset) % PAGE_SIZE;
	if (part && done && done < size)
		done += iommu_unmap_fast(domain, iova + done, min(PAGE_SIZE - part, size - done),
					 &gather);
	iommu_iotlb_sync(domain, &gather);
	if (done == size)
		return real_last_index + 1;
	return iopt_area_index(area) +
	       (iova + done - iopt_area_iova(area) + area->page_offset) / PAGE_SIZE;
}

/* Runs that are mapped by one walk. */
#define MOST_MAPPED 32

/* Maps the next runs of a batch at @iova, and counts them in @cur and @len. */
static int batch_map_runs(struct pfn_batch *batch, unsigned int *cur, struct iommu_domain *domain,
			  unsigned long iova, size_t left, unsigned int page_offset, int prot,
			  size_t *len)
{
	struct iommu_run runs[MOST_MAPPED];
	unsigned int count = 0;

	for (*len = 0; count < MOST_MAPPED && *cur < batch->end; count++, (*cur)++) {
		runs[count].phys = PFN_PHYS(batch->pfns[*cur]) + page_offset;
		runs[count].len = min(batch->npfns[*cur] * PAGE_SIZE - page_offset, left - *len);
		*len += runs[count].len;
		page_offset = 0;
	}
	return iommu_map_runs(domain, iova, runs, count, prot, GFP_KERNEL_ACCOUNT);
}

//@ drivers/iommu/iommufd/pages.c, before: 		next_iova = min(last_iova + 1,
		if (!disable_large_pages && iommu_has_runs(domain)) {
			size_t len;

			rc = batch_map_runs(batch, &cur, domain, iova, last_iova - iova + 1,
					    page_offset, iommu_prot, &len);
			if (rc)
				goto err_unmap;
			iova += len;
			next_iova = iova;
			page_offset = 0;
			continue;
		}
//@ drivers/iommu/iommufd/pages.c, before: iopt_area_unpin_domain(struct pfn_batch *batch, struct iopt_area *area,
iopt_area_unpin_runs(struct pfn_batch *batch, struct iopt_area *area, struct iopt_pages *pages,
		     struct iommu_domain *domain, unsigned long start_index,
		     unsigned long last_index, unsigned long *unmapped_end_index,
		     unsigned long real_last_index)
{
	while (start_index <= last_index) {
		unsigned long end = *unmapped_end_index;

		/* Pages that are carried over and fill the batch are unpinned first. */
		if (end <= last_index && batch->end < batch->array_size) {
			end = batch_unmap_from_domain(batch, domain, area, end, start_index,
						      last_index, real_last_index);
			if (WARN_ON(end == *unmapped_end_index)) {
				/* What cannot be found stays pinned. */
				*unmapped_end_index = real_last_index + 1;
				batch_clear(batch);
				return;
			}
			*unmapped_end_index = end;
			if (end <= start_index)
				continue;
		}
		end = min(end, last_index + 1);
		batch_unpin(batch, pages, 0, end - start_index);
		start_index = end;
		batch_clear_carry(batch, *unmapped_end_index - end);
		cond_resched();
	}
}

static void
//@ drivers/iommu/iommufd/pages.c, before: 		iopt_area_unpin_domain(&batch, area, pages, domain,
		if (iommu_has_runs(domain))
			iopt_area_unpin_runs(&batch, area, pages, domain, span.start_hole,
					     span.last_hole, &unmapped_end_index, last_index);
		else
