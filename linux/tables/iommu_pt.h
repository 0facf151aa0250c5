/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/*
 * The operations of a format by the crate iopt, in the place of drivers/iommu/generic_pt/iommu_pt.h.
 *
 * Each file of a format includes this after Linux's description of the format. Of that it uses how a table begins, which
 * attributes leaves have and how the unit gets the root. Entries are read and written by src/lib.rs alone.
 *
 * A table's root is where Linux has it, in struct pt_common, and nothing else is kept of it: what Rust needs to know is
 * put together for each call. Operations that run at once have disjoint ranges; that is the contract of struct
 * pt_iommu_ops.
 */
#ifndef DMASPACE_IOMMU_PT_H
#define DMASPACE_IOMMU_PT_H

#include "pt_iter.h"

#include <linux/export.h>
#include <linux/iommu.h>
#include <linux/mem_encrypt.h>
#include <linux/module.h>
#include "../tables.h"

#define RUST(op) CONCATENATE(CONCATENATE(dmaspace_, PTPFX), op)
#define EXPORTED(op) CONCATENATE(CONCATENATE(pt_iommu_, PTPFX), op)
#define CFG CONCATENATE(pt_iommu_table, _cfg)

/* False at compile time where the format does not know it: then Rust has no functions for it. */
static __always_inline bool is_incoherent(struct pt_common *common)
{
	return pt_feature(common, PT_FEAT_DMA_INCOHERENT);
}

/* The unit, if it reads memory past the processor's caches. */
static __always_inline struct device *incoherent(struct pt_iommu *iommu)
{
	return is_incoherent(common_from_iommu(iommu)) ? iommu->iommu_device : NULL;
}

static __always_inline struct dmaspace_call call_of(struct pt_iommu *iommu)
{
	return (struct dmaspace_call){
		.top = READ_ONCE(common_from_iommu(iommu)->top_of_table),
		.sizes = iommu->domain.pgsize_bitmap,
		.device = incoherent(iommu),
		.node = iommu->nid,
	};
}

/* The range is one that the table can have. */
static __always_inline int check_range(struct pt_common *common, u64 iova, u64 len)
{
	u64 last;

	if (unlikely(!len))
		return -EINVAL;
	if (unlikely(check_add_overflow(iova, len - 1, &last)))
		return -EOVERFLOW;
	/* Where addresses are sign-extended, all that a format has: Rust looks. */
	if (!pt_feature(common, PT_FEAT_SIGN_EXTEND) && common->max_vasz_lg2 < 64 &&
	    unlikely(last >> common->max_vasz_lg2))
		return -ERANGE;
	return 0;
}

phys_addr_t EXPORTED(iova_to_phys)(struct iommu_domain *domain, dma_addr_t iova)
{
	struct pt_common *common =
		common_from_iommu(container_of(domain, struct pt_iommu, domain));

	if (check_range(common, iova, 1))
		return 0;
	return RUST(translate)(READ_ONCE(common->top_of_table), iova);
}
EXPORT_SYMBOL_NS_GPL(EXPORTED(iova_to_phys), "GENERIC_PT_IOMMU");

int EXPORTED(read_and_clear_dirty)(struct iommu_domain *domain, unsigned long iova, size_t size,
				   unsigned long flags, struct iommu_dirty_bitmap *dirty)
{
	struct pt_iommu *iommu = container_of(domain, struct pt_iommu, domain);
	struct dmaspace_call call = call_of(iommu);
	/* Dirty entries that stay are in no unit's way. */
	struct iommu_dirty_bitmap only = { .bitmap = dirty->bitmap };
	bool clean = !(flags & IOMMU_DIRTY_NO_CLEAR);
	int error = check_range(common_from_iommu(iommu), iova, size);

	if (!IS_ENABLED(CONFIG_IOMMUFD_DRIVER))
		return -EOPNOTSUPP;
	if (error)
		return error;
	return RUST(dirty)(&call, iova, size, clean, dmaspace_record, clean ? dirty : &only);
}
EXPORT_SYMBOL_NS_GPL(EXPORTED(read_and_clear_dirty), "GENERIC_PT_IOMMU");

static int __maybe_unused NS(set_dirty)(struct pt_iommu *iommu, dma_addr_t iova)
{
	struct dmaspace_call call = call_of(iommu);
	int error = check_range(common_from_iommu(iommu), iova, 1);

	return error ? error : RUST(set_dirty)(&call, iova);
}

/* An address is above all that a root at this level translates. */
static __always_inline bool beyond(u8 level, u64 last)
{
	return level < PT_MAX_TOP_LEVEL && last >> (PT_GRANULE_LG2SZ + 9 * (level + 1));
}

/*
 * Tables above the root, so that the table translates up to `last`. Everything that others map meanwhile stays: the new
 * root leads to the old one. Who was quicker has made one that this one would leave out, so it is looked at again.
 */
static noinline int raise(struct pt_iommu *iommu, u64 last, gfp_t gfp)
{
	struct pt_common *common = common_from_iommu(iommu);
	struct dmaspace_call call = call_of(iommu);
	struct dmaspace_chain chain = {};
	spinlock_t *lock;
	unsigned long flags;
	uintptr_t top;
	u64 root;
	u8 level;
	int error;

	for (level = call.top & PT_TOP_LEVEL_MASK; level < PT_MAX_TOP_LEVEL; level++)
		if (!beyond(level, last))
			break;
	/* Another operation has raised it meanwhile. */
	if (level == (call.top & PT_TOP_LEVEL_MASK))
		return 0;
	call.gfp = gfp;
	error = RUST(raise)(&call, level + 1, &root, &chain);
	if (error)
		return error;
	top = (uintptr_t)__va(root) | level;
	lock = iommu->driver_ops->get_top_lock(iommu);
	spin_lock_irqsave(lock, flags);
	if (common->top_of_table != call.top) {
		spin_unlock_irqrestore(lock, flags);
		dmaspace_free_tables(incoherent(iommu), &chain);
		return -EAGAIN;
	}
	/* The unit has it before anything is mapped that only it leads to. */
	iommu->driver_ops->change_top(iommu, root, level);
	WRITE_ONCE(common->top_of_table, top);
	spin_unlock_irqrestore(lock, flags);
	return 0;
}

/* The largest page that can begin at an address, as Linux's core chose it before there were ranges. */
static u64 one_page(const struct dmaspace_call *call, u64 address, u64 len)
{
	u64 sizes = call->sizes & GENMASK_U64(__fls(len), 0);

	if (address)
		sizes &= GENMASK_U64(__ffs(address), 0);
	return sizes ? 1ULL << __fls(sizes) : len;
}

/* Empty tables gave way to larger leaves: no unit may still look into them. */
static noinline void flush_replaced(struct pt_iommu *iommu, u64 iova, u64 len,
				    const struct dmaspace_chain *chain)
{
	struct iommu_iotlb_gather gather;

	iommu_iotlb_gather_init(&gather);
	dmaspace_list_tables(&gather.freelist, incoherent(iommu), chain);
	iommu_iotlb_gather_add_range(&gather, iova, len);
	if (pt_feature(common_from_iommu(iommu), PT_FEAT_DETAILED_GATHER))
		gather.pt.table_levels_bitmap = GENMASK(PT_MAX_TOP_LEVEL, 1);
	iommu_iotlb_sync(&iommu->domain, &gather);
}

static __always_inline int map_run(struct pt_iommu *iommu, const struct dmaspace_call *call, u64 iova,
				   u64 pa, u64 len)
{
	struct dmaspace_chain chain;
	int error;

	chain.count = 0;
	if (is_incoherent(common_from_iommu(iommu)))
		error = CONCATENATE(RUST(map), _incoherent)(call, iova, pa, len, &chain);
	else
		error = RUST(map)(call, iova, pa, len, &chain);
	if (unlikely(chain.count))
		flush_replaced(iommu, iova, len, &chain);
	return error;
}

/*
 * Checks a map of `len` bytes, the first at `pa`, of which `last_pa` is the highest, and has a root that translates them.
 * Fills in what Rust is to be called with.
 */
static __always_inline int prepare_map(struct pt_iommu *iommu, u64 iova, u64 pa, u64 last_pa, u64 len,
				       unsigned int prot, gfp_t gfp, struct dmaspace_call *call)
{
	struct pt_common *common = common_from_iommu(iommu);
	struct pt_write_attrs attributes;
	u64 last;
	int error;

	if (WARN_ON(!(prot & (IOMMU_READ | IOMMU_WRITE))))
		return -EINVAL;
	error = check_range(common, iova, len);
	if (unlikely(error))
		return error;
	if (unlikely(last_pa >> common->max_oasz_lg2))
		return -ERANGE;
	error = pt_iommu_set_prot(common, &attributes, prot);
	if (unlikely(error))
		return error;
	*call = call_of(iommu);
	if (pt_feature(common, PT_FEAT_DYNAMIC_TOP)) {
		/* One leaf for all that a root translates is in a table above it. */
		last = iova + (len - 1) + (!iova && !(pa & (len - 1)) && call->sizes & len);
		while (unlikely(beyond(call->top & PT_TOP_LEVEL_MASK, last))) {
			error = raise(iommu, last, gfp);
			if (error && error != -EAGAIN)
				return error;
			*call = call_of(iommu);
		}
	}
	call->bits = attributes.descriptor_bits;
	call->gfp = gfp;
	this_cpu_inc(dmaspace_maps);
	return 0;
}

static int NS(map_range)(struct pt_iommu *iommu, dma_addr_t iova, phys_addr_t pa, dma_addr_t len,
			 unsigned int prot, gfp_t gfp, size_t *mapped)
{
	struct dmaspace_call call;
	u64 done, page;
	int error;

	error = prepare_map(iommu, iova, pa, pa + (len - 1), len, prot, gfp, &call);
	if (unlikely(error))
		return error;
	if (unlikely(dmaspace_one)) {
		for (done = 0; done < len && !error; done += error ? 0 : page) {
			page = one_page(&call, (iova + done) | (pa + done), len - done);
			error = map_run(iommu, &call, iova + done, pa + done, page);
		}
		*mapped += done;
		return error;
	}
	error = map_run(iommu, &call, iova, pa, len);
	if (likely(!error))
		*mapped += len;
	return error;
}

/* What an unmap has removed is to be flushed, and its tables are to be freed then. */
static __always_inline void gather_unmapped(struct pt_iommu *iommu, u64 iova, u64 unmapped,
					    const struct dmaspace_chain *chain,
					    struct iommu_iotlb_gather *gather)
{
	struct pt_common *common = common_from_iommu(iommu);

	/* A queue of flushes is emptied by one flush of everything. */
	if (!iommu_iotlb_gather_queued(gather)) {
		/* The gather so far is flushed, and its tables freed, before these are put there. */
		if (pt_feature(common, PT_FEAT_FLUSH_RANGE_NO_GAPS) &&
		    iommu_iotlb_gather_is_disjoint(gather, iova, unmapped))
			iommu_iotlb_sync(&iommu->domain, gather);
		iommu_iotlb_gather_add_range(gather, iova, unmapped);
	}
	if (unlikely(chain->count))
		dmaspace_list_tables(&gather->freelist, incoherent(iommu), chain);
	if (pt_feature(common, PT_FEAT_DETAILED_GATHER)) {
		gather->pt.leaf_levels_bitmap |= chain->leaf_levels;
		if (chain->tables)
			gather->pt.table_levels_bitmap |= GENMASK(PT_MAX_TOP_LEVEL, 1);
	}
}

static __always_inline size_t unmap_run(struct pt_iommu *iommu, const struct dmaspace_call *call,
					u64 iova, u64 len, struct iommu_iotlb_gather *gather)
{
	struct dmaspace_chain chain;
	size_t unmapped;

	chain.count = 0;
	if (is_incoherent(common_from_iommu(iommu)))
		unmapped = CONCATENATE(RUST(unmap), _incoherent)(call, iova, len, &chain);
	else
		unmapped = RUST(unmap)(call, iova, len, &chain);
	if (likely(unmapped))
		gather_unmapped(iommu, iova, unmapped, &chain, gather);
	return unmapped;
}

static size_t NS(unmap_range)(struct pt_iommu *iommu, dma_addr_t iova, dma_addr_t len,
			      struct iommu_iotlb_gather *gather)
{
	struct dmaspace_call call;
	u64 done, page, unmapped;

	if (unlikely(check_range(common_from_iommu(iommu), iova, len)))
		return 0;
	call = call_of(iommu);
	if (unlikely(dmaspace_one)) {
		for (done = 0; done < len; done += unmapped) {
			page = one_page(&call, iova + done, len - done);
			unmapped = unmap_run(iommu, &call, iova + done, page, gather);
			if (!unmapped)
				break;
		}
		return done;
	}
	return unmap_run(iommu, &call, iova, len, gather);
}

#ifdef IOMMU_UNMAP_RUNS
static int NS(map_runs)(struct pt_iommu *iommu, dma_addr_t iova, const struct iommu_run *runs,
			unsigned int count, unsigned int prot, gfp_t gfp)
{
	struct dmaspace_chain chain;
	struct dmaspace_call call;
	u64 len = 0, last_pa = 0;
	unsigned int i;
	int error;

	for (i = 0; i < count; i++) {
		len += runs[i].len;
		last_pa = max(last_pa, runs[i].phys + (runs[i].len - 1));
	}
	error = prepare_map(iommu, iova, runs[0].phys, last_pa, len, prot, gfp, &call);
	if (unlikely(error))
		return error;
	chain.count = 0;
	if (is_incoherent(common_from_iommu(iommu)))
		error = CONCATENATE(RUST(map_runs), _incoherent)(&call, iova, runs, count, &chain);
	else
		error = RUST(map_runs)(&call, iova, runs, count, &chain);
	if (unlikely(chain.count))
		flush_replaced(iommu, iova, len, &chain);
	return error;
}

static void take_run(void *to, u64 pa, u64 len)
{
	struct iommu_runs *runs = to;

	runs->add(runs, pa, len);
}

static size_t NS(unmap_runs)(struct pt_iommu *iommu, dma_addr_t iova, dma_addr_t len,
			     struct iommu_iotlb_gather *gather, struct iommu_runs *runs)
{
	struct dmaspace_chain chain;
	struct dmaspace_call call;
	size_t unmapped;

	if (unlikely(check_range(common_from_iommu(iommu), iova, len)))
		return 0;
	call = call_of(iommu);
	this_cpu_inc(dmaspace_unmaps);
	chain.count = 0;
	if (is_incoherent(common_from_iommu(iommu)))
		unmapped = CONCATENATE(RUST(unmap_runs), _incoherent)(
			&call, iova, len, runs->most, runs->room, &chain, take_run, runs);
	else
		unmapped = RUST(unmap_runs)(&call, iova, len, runs->most, runs->room, &chain,
					    take_run, runs);
	if (likely(unmapped))
		gather_unmapped(iommu, iova, unmapped, &chain, gather);
	return unmapped;
}
#endif

#ifdef IOMMU_PAGE_SIZES
/* The unit may hold leaves of the old sizes, and tables that larger leaves have replaced. */
static void flush_resized(void *to, u64 iova, u64 len, u32 leaf_levels, bool tables)
{
	struct pt_iommu *iommu = to;
	struct iommu_domain *domain = &iommu->domain;
	struct iommu_iotlb_gather gather;

	/* Drivers see only by tables in the gather that there are any. */
	if (tables && domain->ops->flush_iotlb_all) {
		iommu_flush_iotlb_all(domain);
		return;
	}
	iommu_iotlb_gather_init(&gather);
	iommu_iotlb_gather_add_range(&gather, iova, len);
	if (pt_feature(common_from_iommu(iommu), PT_FEAT_DETAILED_GATHER))
		gather.pt.leaf_levels_bitmap = leaf_levels;
	iommu_iotlb_sync(domain, &gather);
}

static int resize(struct pt_iommu *iommu, u64 iova, u64 len, u64 largest, gfp_t gfp)
{
	struct dmaspace_call call = call_of(iommu);

	call.gfp = gfp;
	if (is_incoherent(common_from_iommu(iommu)))
		return CONCATENATE(RUST(resize), _incoherent)(&call, iova, len, largest,
							      flush_resized, iommu);
	return RUST(resize)(&call, iova, len, largest, flush_resized, iommu);
}

static int NS(set_page_size)(struct pt_iommu *iommu, dma_addr_t iova, dma_addr_t len,
			     size_t largest, gfp_t gfp)
{
	int error = check_range(common_from_iommu(iommu), iova, len);

	return error ? error : resize(iommu, iova, len, largest, gfp);
}

static int NS(cut)(struct pt_iommu *iommu, dma_addr_t iova, gfp_t gfp)
{
	int error = check_range(common_from_iommu(iommu), iova, 1);

	return error ? error : resize(iommu, iova, 0, 0, gfp);
}
#endif

static void NS(get_info)(struct pt_iommu *iommu, struct pt_iommu_info *info)
{
	struct pt_common *common = common_from_iommu(iommu);
	u8 levels = pt_feature(common, PT_FEAT_DYNAMIC_TOP) ?
			    PT_MAX_TOP_LEVEL + 1 :
			    (common->top_of_table & PT_TOP_LEVEL_MASK) + 1;
	struct pt_range range = pt_top_range(common);
	struct pt_state pts = pt_init_top(&range);
	u64 sizes = 0;

	/* Linux leaves out what units have errata for. */
	for (pts.level = 0; pts.level < levels; pts.level++)
		sizes |= pt_possible_sizes(&pts);
	/* A leaf is smaller than what the table translates, and than memory. */
	sizes &= GENMASK_U64(common->max_vasz_lg2 - 2, 0) &
		 GENMASK_U64(common->max_oasz_lg2 - 1, 0);
	info->pgsize_bitmap = sizes & RUST(sizes)(levels);
}

#ifdef IOMMU_TABLE_IMAGE
static void NS(image)(struct pt_iommu *iommu, struct pt_image *image)
{
	pt_image_tables(common_from_iommu(iommu), image);
}
#endif

#ifdef IOMMU_TABLE_EXCHANGE
static int NS(exchange)(struct pt_iommu *iommu, void **top, u8 *levels)
{
	return pt_exchange_top(common_from_iommu(iommu), top, levels);
}
#endif

static void NS(deinit)(struct pt_iommu *iommu)
{
	struct dmaspace_call call = call_of(iommu);
	struct dmaspace_chain chain = {};

	/* The driver has seen to it that no unit has any of it. */
	RUST(collect)(&call, &chain);
	dmaspace_free_tables(incoherent(iommu), &chain);
}

static const struct pt_iommu_ops NS(ops) = {
	.map_range = NS(map_range),
	.unmap_range = NS(unmap_range),
#ifdef IOMMU_UNMAP_RUNS
	.unmap_runs = NS(unmap_runs),
	.map_runs = NS(map_runs),
#endif
#ifdef IOMMU_PAGE_SIZES
	.set_page_size = NS(set_page_size),
	.cut = NS(cut),
#endif
#if IS_ENABLED(CONFIG_IOMMUFD_DRIVER) && IS_ENABLED(CONFIG_IOMMUFD_TEST)
	.set_dirty = NS(set_dirty),
#endif
#ifdef IOMMU_TABLE_IMAGE
	.image = NS(image),
#endif
#ifdef IOMMU_TABLE_EXCHANGE
	.exchange = NS(exchange),
#endif
	.get_info = NS(get_info),
	.deinit = NS(deinit),
};

/* The configuration is one of Linux's, and one that Rust has. */
static int configure(struct pt_iommu_table *table, const struct CFG *cfg)
{
	struct pt_common *common = common_from_iommu(&table->iommu);
	const struct pt_iommu_cfg *wanted = &cfg->common;
	int error;

	if (!wanted->hw_max_oasz_lg2 || !wanted->hw_max_vasz_lg2 ||
	    wanted->hw_max_vasz_lg2 > PT_MAX_VA_ADDRESS_LG2)
		return -EINVAL;
	if (wanted->features & ~(unsigned int)PT_SUPPORTED_FEATURES)
		return -EOPNOTSUPP;
	/* Encrypted tables are not brought in here. */
	if (__sme_set(0ULL))
		return -EOPNOTSUPP;
	common->features = wanted->features;
	common->max_vasz_lg2 = wanted->hw_max_vasz_lg2;
	common->max_oasz_lg2 = wanted->hw_max_oasz_lg2;
	error = pt_iommu_fmt_init(table, cfg);
	if (error)
		return error;
	if (wanted->hw_max_oasz_lg2 > pt_max_oa_lg2(common))
		return -EINVAL;
	if (common->max_vasz_lg2 == 64)
		common->features |= BIT(PT_FEAT_FULL_VA);
	if (!IS_ENABLED(CONFIG_DEBUG_GENERIC_PT) &&
	    (common->features & PT_FORCE_ENABLED_FEATURES) != PT_FORCE_ENABLED_FEATURES)
		return -EOPNOTSUPP;
	if (pt_feature(common, PT_FEAT_SIGN_EXTEND) &&
	    common->features & (BIT(PT_FEAT_FULL_VA) | BIT(PT_FEAT_DYNAMIC_TOP)))
		return -EINVAL;
	/* More addresses than the levels translate. */
	if (!pt_feature(common, PT_FEAT_DYNAMIC_TOP) && common->max_vasz_lg2 <= 63 &&
	    common->max_vasz_lg2 >
		    PT_GRANULE_LG2SZ + 9 * ((common->top_of_table & PT_TOP_LEVEL_MASK) + 1))
		return -EOPNOTSUPP;
	return 0;
}

static void domain_init(struct pt_iommu *iommu)
{
	struct pt_common *common = common_from_iommu(iommu);
	struct iommu_domain *domain = &iommu->domain;
	struct pt_iommu_info info;
	unsigned int bits = common->max_vasz_lg2;

	NS(get_info)(iommu, &info);
	domain->type = __IOMMU_DOMAIN_PAGING;
	domain->pgsize_bitmap = info.pgsize_bitmap;
	domain->is_iommupt = true;
	/* Where addresses are sign-extended, the lower half. */
	if (pt_feature(common, PT_FEAT_SIGN_EXTEND))
		bits--;
	domain->geometry.aperture_start = 0;
	domain->geometry.aperture_end = GENMASK_U64(bits - 1, 0);
	domain->geometry.force_aperture = true;
}

int EXPORTED(init)(struct pt_iommu_table *table, const struct CFG *cfg, gfp_t gfp)
{
	struct pt_iommu *iommu = &table->iommu;
	const struct pt_iommu given = *iommu;
	struct pt_common *common = common_from_iommu(iommu);
	void *root;
	int error;

	static_assert(!offsetof(struct pt_iommu_table, iommu.domain));
	memset_after(table, 0, iommu.domain);
	iommu->iommu_device = given.iommu_device;
	iommu->driver_ops = given.driver_ops;
	iommu->nid = given.nid;
	error = configure(table, cfg);
	if (error)
		return error;
	if (pt_feature(common, PT_FEAT_DYNAMIC_TOP) &&
	    WARN_ON(!iommu->driver_ops || !iommu->driver_ops->change_top ||
		    !iommu->driver_ops->get_top_lock))
		return -EINVAL;
	if (pt_feature(common, PT_FEAT_DMA_INCOHERENT) && WARN_ON(!iommu->iommu_device))
		return -EINVAL;
	domain_init(iommu);
	root = iommu_alloc_pages_node_sz(iommu->nid, gfp, PAGE_SIZE);
	if (!root)
		return -ENOMEM;
	if (pt_feature(common, PT_FEAT_DMA_INCOHERENT)) {
		error = iommu_pages_start_incoherent(root, iommu->iommu_device);
		if (error) {
			iommu_free_pages(root);
			return error;
		}
	}
	common->top_of_table |= (uintptr_t)root;
	/* From here on it is taken down by deinit. */
	iommu->ops = &NS(ops);
	return 0;
}
EXPORT_SYMBOL_NS_GPL(EXPORTED(init), "GENERIC_PT_IOMMU");

#ifdef pt_iommu_fmt_hw_info
void EXPORTED(hw_info)(struct pt_iommu_table *table,
		       struct CONCATENATE(pt_iommu_table, _hw_info) *info)
{
	struct pt_range top = pt_top_range(common_from_iommu(&table->iommu));

	pt_iommu_fmt_hw_info(table, &top, info);
}
EXPORT_SYMBOL_NS_GPL(EXPORTED(hw_info), "GENERIC_PT_IOMMU");
#endif

MODULE_LICENSE("Dual MIT/GPL");
MODULE_DESCRIPTION("IOMMU page tables by iopt: " __stringify(PTPFX_RAW));
MODULE_IMPORT_NS("GENERIC_PT");
MODULE_IMPORT_NS("IOMMUFD");

#endif
