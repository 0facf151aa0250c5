// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Leaves of a domain that change their sizes in place, while devices use them: a leaf becomes a table of smaller ones, and
 * leaves that are contiguous become one. Every address keeps its translation at every store. Operations of a domain beside
 * map_range and unmap_range; a call of iommufd sets the largest leaf of a range, and cuts areas, so that IOMMU_IOAS_UNMAP
 * takes a part of one.
 */
//@ include/linux/iommu.h, before: extern size_t iommu_unmap(struct iommu_domain *domain, unsigned long iova,
#define IOMMU_PAGE_SIZES

bool iommu_has_page_sizes(struct iommu_domain *domain);
int iommu_set_page_size(struct iommu_domain *domain, unsigned long iova, size_t size,
			size_t largest, gfp_t gfp);
int iommu_cut(struct iommu_domain *domain, unsigned long iova, gfp_t gfp);
//@ include/linux/generic_pt/iommu.h, before: 	 * @set_dirty: Make the iova write dirty
	 * @set_page_size: Change the sizes of leaves in place
	 * @iommu_table: Table to manipulate
	 * @iova: IO virtual address to start
	 * @len: Length of the range starting from @iova
	 * @largest: Bytes of the largest leaf that is wanted, a power of two, or 0
	 * @gfp: GFP flags for any memory allocations
	 *
	 * Leaves that map a byte of the range and are larger are split, those at its ends whole.
	 * Smaller ones within the range are merged as far as memory is contiguous and attributes
	 * are equal. Each address translates as before at any time, and is written as dirty if any
	 * leaf that it came from was. What the unit may hold of old sizes is flushed. If @largest is
	 * 0, leaves stay as they are, and tables within the range that map nothing are freed.
	 * Optional, with @cut.
	 *
	 * Context: The caller must hold a write range lock that includes
	 * the whole range and the leaves at its ends, and hold off readers.
	 *
	 * Returns: -ERRNO on failure, with translations as they were and some sizes
	 * changed, 0 on success.
	 */
	int (*set_page_size)(struct pt_iommu *iommu_table, dma_addr_t iova, dma_addr_t len,
			     size_t largest, gfp_t gfp);

	/**
	 * @cut: Make an address the first of a leaf
	 * @iommu_table: Table to manipulate
	 * @iova: The address
	 * @gfp: GFP flags for any memory allocations
	 *
	 * As set_page_size(), by the fewest leaves.
	 *
	 * Context: As for set_page_size(), of the leaf around @iova.
	 *
	 * Returns: -ERRNO on failure, with the leaf as it was, 0 on success.
	 */
	int (*cut)(struct pt_iommu *iommu_table, dma_addr_t iova, gfp_t gfp);

	/**
//@ drivers/iommu/iommu.c, at its end

/**
 * iommu_has_page_sizes() - whether iommu_set_page_size() and iommu_cut() may be called
 * @domain: the domain
 */
bool iommu_has_page_sizes(struct iommu_domain *domain)
{
	struct pt_iommu *pt = iommupt_from_domain(domain);

	return pt && pt->ops->set_page_size;
}
EXPORT_SYMBOL_NS_GPL(iommu_has_page_sizes, "IOMMUFD_INTERNAL");

/**
 * iommu_set_page_size() - set the largest leaf of a range while devices use it
 * @domain: a domain of which iommu_has_page_sizes() is true
 * @iova: IO virtual address to start
 * @size: bytes
 * @largest: bytes of the largest leaf, a power of two, or 0: tables that map nothing are freed
 * @gfp: how tables are allocated
 *
 * Return: 0, or an error, with translations as they were.
 */
int iommu_set_page_size(struct iommu_domain *domain, unsigned long iova, size_t size,
			size_t largest, gfp_t gfp)
{
	struct pt_iommu *pt = iommupt_from_domain(domain);

	might_sleep_if(gfpflags_allow_blocking(gfp));
	return pt->ops->set_page_size(pt, iova, size, largest, gfp);
}
EXPORT_SYMBOL_NS_GPL(iommu_set_page_size, "IOMMUFD_INTERNAL");

/**
 * iommu_cut() - make an address the first of a leaf while devices use it
 * @domain: a domain of which iommu_has_page_sizes() is true
 * @iova: IO virtual address
 * @gfp: how tables are allocated
 *
 * Return: 0, also where nothing is mapped, or an error, with the leaf as it was.
 */
int iommu_cut(struct iommu_domain *domain, unsigned long iova, gfp_t gfp)
{
	struct pt_iommu *pt = iommupt_from_domain(domain);

	might_sleep_if(gfpflags_allow_blocking(gfp));
	return pt->ops->cut(pt, iova, gfp);
}
EXPORT_SYMBOL_NS_GPL(iommu_cut, "IOMMUFD_INTERNAL");
//@ include/uapi/linux/iommufd.h, before: 	IOMMUFD_CMD_HW_QUEUE_ALLOC = 0x94,
	IOMMUFD_CMD_IOAS_PAGE_SIZE = 0x95,
//@ include/uapi/linux/iommufd.h, before: #define IOMMU_IOAS_CHANGE_PROCESS \
/**
 * enum iommufd_ioas_page_size_flags - Flags for IOMMU_IOAS_PAGE_SIZE
 * @IOMMU_IOAS_PAGE_SIZE_CUT: Cut areas at the ends of the range, so that
 *                            IOMMU_IOAS_UNMAP takes it, or any side of it, alone
 */
enum iommufd_ioas_page_size_flags {
	IOMMU_IOAS_PAGE_SIZE_CUT = 1 << 0,
};

/**
 * struct iommu_ioas_page_size - ioctl(IOMMU_IOAS_PAGE_SIZE)
 * @size: sizeof(struct iommu_ioas_page_size)
 * @ioas_id: IOAS ID of the mappings
 * @flags: Combination of enum iommufd_ioas_page_size_flags
 * @__reserved: Must be 0
 * @iova: IOVA to start
 * @length: Number of bytes, all of them mapped
 * @largest: Bytes of the largest page of the IOMMU in the range, a power of two, or 0: pages
 *           stay as they are, and tables in the range that map nothing are freed
 *
 * Larger pages are split, whole where they reach over an end of the range.
 * Smaller ones are merged within an area, to 1 GiB at most, as far as their memory
 * is contiguous.
 * Devices go on with DMA: each address leads where it led at any time. iova and
 * length are multiples of the processor's page size, and largest is no less.
 * A domain that is attached later has the largest pages again, and with
 * IOMMU_OPTION_HUGE_PAGES off they stay small. Fails with EOPNOTSUPP, and nothing
 * changed, if a domain of the IOAS cannot do it. Areas of dma-bufs (EOPNOTSUPP), and
 * those in which an access has pinned pages (EINVAL), are not cut.
 */
struct iommu_ioas_page_size {
	__u32 size;
	__u32 ioas_id;
	__u32 flags;
	__u32 __reserved;
	__aligned_u64 iova;
	__aligned_u64 length;
	__aligned_u64 largest;
};
#define IOMMU_IOAS_PAGE_SIZE _IO(IOMMUFD_TYPE, IOMMUFD_CMD_IOAS_PAGE_SIZE)

//@ drivers/iommu/iommufd/iommufd_private.h, before: void iopt_enable_large_pages(struct io_pagetable *iopt);
int iopt_set_page_size(struct io_pagetable *iopt, unsigned long iova,
		       unsigned long last, size_t largest, bool cut);
//@ drivers/iommu/iommufd/iommufd_private.h, before: int iommufd_ioas_unmap(struct iommufd_ucmd *ucmd);
int iommufd_ioas_page_size(struct iommufd_ucmd *ucmd);
//@ drivers/iommu/iommufd/main.c, before: 	struct iommu_ioas_unmap unmap;
	struct iommu_ioas_page_size page_size;
//@ drivers/iommu/iommufd/main.c, before: 	IOCTL_OP(IOMMU_IOAS_UNMAP, iommufd_ioas_unmap, struct iommu_ioas_unmap,
	IOCTL_OP(IOMMU_IOAS_PAGE_SIZE, iommufd_ioas_page_size,
		 struct iommu_ioas_page_size, largest),
//@ drivers/iommu/iommufd/ioas.c, at its end

int iommufd_ioas_page_size(struct iommufd_ucmd *ucmd)
{
	struct iommu_ioas_page_size *cmd = ucmd->cmd;
	struct iommufd_ioas *ioas;
	unsigned long last;
	int rc;

	if (cmd->flags & ~IOMMU_IOAS_PAGE_SIZE_CUT || cmd->__reserved)
		return -EOPNOTSUPP;
	if (cmd->iova >= ULONG_MAX || cmd->length >= ULONG_MAX ||
	    cmd->largest >= ULONG_MAX)
		return -EOVERFLOW;
	if (!cmd->length || (cmd->iova | cmd->length) & ~PAGE_MASK ||
	    (cmd->largest && (!is_power_of_2(cmd->largest) || cmd->largest < PAGE_SIZE)) ||
	    (!cmd->largest && cmd->flags))
		return -EINVAL;
	if (check_add_overflow((unsigned long)cmd->iova, (unsigned long)cmd->length - 1, &last))
		return -EOVERFLOW;

	ioas = iommufd_get_ioas(ucmd->ictx, cmd->ioas_id);
	if (IS_ERR(ioas))
		return PTR_ERR(ioas);
	rc = iopt_set_page_size(&ioas->iopt, cmd->iova, last, cmd->largest,
				cmd->flags & IOMMU_IOAS_PAGE_SIZE_CUT);
	iommufd_put_object(ucmd->ictx, &ioas->obj);
	return rc;
}
//@ drivers/iommu/iommufd/io_pagetable.c, before: static int iopt_area_split(struct iopt_area *area, unsigned long iova)
static bool iopt_has_page_sizes(struct io_pagetable *iopt)
{
	struct iommu_domain *domain;
	unsigned long index;

	lockdep_assert_held(&iopt->domains_rwsem);
	xa_for_each(&iopt->domains, index, domain)
		if (!iommu_has_page_sizes(domain))
			return false;
	return true;
}

/* Makes an address of an area the first of a leaf in all domains. */
static int iopt_area_cut(struct iopt_area *area, unsigned long iova)
{
	struct io_pagetable *iopt = area->iopt;
	struct iommu_domain *domain;
	unsigned long index;
	int rc;

	lockdep_assert_held(&area->pages->mutex);
	/* Both sides have whole pages to unpin. */
	if (iopt_area_start_byte(area, iova) % PAGE_SIZE)
		return -EINVAL;
	xa_for_each(&iopt->domains, index, domain) {
		rc = iommu_cut(domain, iova, GFP_KERNEL_ACCOUNT);
		if (rc)
			return rc;
	}
	return 0;
}

//@ drivers/iommu/iommufd/io_pagetable.c, before: 	if (area->storage_domain && !iopt->disable_large_pages) {
	if (area->storage_domain && iopt_has_page_sizes(iopt)) {
		rc = iopt_area_cut(area, new_start);
		if (rc)
			goto err_unlock;
	} else
//@ drivers/iommu/iommufd/io_pagetable.c, before: 	down_write(&iopt->iova_rwsem);\n	for (i = 0; i < num_iovas; i++) {
	down_read(&iopt->domains_rwsem);
//@ drivers/iommu/iommufd/io_pagetable.c, before: 	return rc;\n}\n\nvoid iopt_enable_large_pages(struct io_pagetable *iopt)
	up_read(&iopt->domains_rwsem);
//@ drivers/iommu/iommufd/io_pagetable.c, before: void iopt_enable_large_pages(struct io_pagetable *iopt)
/* Areas are cut in front of @iova, if one lies around it. */
static int iopt_cut_before(struct io_pagetable *iopt, unsigned long iova)
{
	struct iopt_area *area;

	area = iova ? iopt_area_iter_first(iopt, iova - 1, iova - 1) : NULL;
	return area ? iopt_area_split(area, iova - 1) : 0;
}

/* Bytes after which others may run; leaves that are merged are no larger. */
#define IOPT_PAGE_SIZE_STEP SZ_1G

static int iopt_area_set_page_size(struct iopt_area *area, unsigned long iova,
				   unsigned long last, size_t largest)
{
	struct iopt_pages *pages = area->pages;
	struct iommu_domain *domain;
	unsigned long index, end;
	int rc = 0;

	/* Accesses read their pages from a domain. */
	mutex_lock(&pages->mutex);
	for (; !rc; iova = end + 1) {
		end = min(last, iova | (IOPT_PAGE_SIZE_STEP - 1));
		xa_for_each(&area->iopt->domains, index, domain) {
			rc = iommu_set_page_size(domain, iova, end - iova + 1, largest,
						 GFP_KERNEL_ACCOUNT);
			if (rc)
				break;
		}
		if (end == last)
			break;
		if (!rc && fatal_signal_pending(current))
			rc = -EINTR;
		cond_resched();
	}
	mutex_unlock(&pages->mutex);
	return rc;
}

/* Bytes after which others may run. */
#define IOPT_FREE_TABLES_STEP BIT_ULL(44)

static int iopt_free_empty_tables(struct iommu_domain *domain, unsigned long iova,
				  unsigned long last)
{
	unsigned long step;
	int rc;

	last = min(last, domain->geometry.aperture_end);
	for (; iova <= last; iova = step + 1) {
		step = min(last, iova | (IOPT_FREE_TABLES_STEP - 1));
		rc = iommu_set_page_size(domain, iova, step - iova + 1, 0, GFP_KERNEL_ACCOUNT);
		if (!rc && fatal_signal_pending(current))
			rc = -EINTR;
		if (rc)
			return rc;
		if (step == last)
			break;
		cond_resched();
	}
	return 0;
}

/* Where there are areas they may be filled or emptied right now. New ones want the lock. */
static int iopt_free_tables_of_holes(struct io_pagetable *iopt, unsigned long iova,
				     unsigned long last)
{
	struct interval_tree_span_iter span;
	struct iommu_domain *domain;
	unsigned long index;
	int rc;

	lockdep_assert_held_write(&iopt->iova_rwsem);
	interval_tree_for_each_span(&span, &iopt->area_itree, iova, last) {
		if (!span.is_hole)
			continue;
		xa_for_each(&iopt->domains, index, domain) {
			rc = iopt_free_empty_tables(domain, span.start_hole, span.last_hole);
			if (rc)
				return rc;
		}
	}
	return 0;
}

int iopt_set_page_size(struct io_pagetable *iopt, unsigned long iova,
		       unsigned long last, size_t largest, bool cut)
{
	struct iopt_area_contig_iter iter;
	struct iopt_area *area;
	int rc = 0;

	down_read(&iopt->domains_rwsem);
	/* Areas do not come, go or change in between. */
	down_write(&iopt->iova_rwsem);
	if (!iopt_has_page_sizes(iopt)) {
		rc = -EOPNOTSUPP;
		goto out_unlock;
	}
	if (!largest) {
		rc = iopt_free_tables_of_holes(iopt, iova, last);
		goto out_unlock;
	}
	if (iopt->disable_large_pages)
		largest = PAGE_SIZE;
	iopt_for_each_contig_area(&iter, area, iopt, iova, last)
		;
	if (!iopt_area_contig_done(&iter)) {
		rc = -ENOENT;
		goto out_unlock;
	}
	if (cut) {
		rc = iopt_cut_before(iopt, iova);
		if (!rc && last != ULONG_MAX)
			rc = iopt_cut_before(iopt, last + 1);
		if (rc)
			goto out_unlock;
	}
	iopt_for_each_contig_area(&iter, area, iopt, iova, last) {
		rc = iopt_area_set_page_size(area, iter.cur_iova,
					     min(last, iopt_area_last_iova(area)), largest);
		if (rc)
			break;
	}
out_unlock:
	up_write(&iopt->iova_rwsem);
	up_read(&iopt->domains_rwsem);
	return rc;
}
//@ tools/testing/selftests/iommu/iommufd_utils.h, before: static int _test_ioctl_ioas_map_file(int fd, unsigned int ioas_id, int mfd,
static int _test_ioctl_page_size(int fd, unsigned int ioas_id, __u64 iova, size_t length,
				 size_t largest, __u32 flags)
{
	struct iommu_ioas_page_size cmd = {
		.size = sizeof(cmd),
		.ioas_id = ioas_id,
		.flags = flags,
		.iova = iova,
		.length = length,
		.largest = largest,
	};

	return ioctl(fd, IOMMU_IOAS_PAGE_SIZE, &cmd);
}
#define test_ioctl_page_size(iova, length, largest, flags)                    \
	ASSERT_EQ(0, _test_ioctl_page_size(self->fd, self->ioas_id, iova,     \
					   length, largest, flags))
#define test_err_ioctl_page_size(_errno, iova, length, largest, flags)        \
	EXPECT_ERRNO(_errno, _test_ioctl_page_size(self->fd, self->ioas_id,   \
						   iova, length, largest, flags))

//@ tools/testing/selftests/iommu/iommufd.c, before: #undef TEST_LENGTH
	TEST_LENGTH(iommu_ioas_page_size, IOMMU_IOAS_PAGE_SIZE, largest);
//@ tools/testing/selftests/iommu/iommufd.c, before: FIXTURE(iommufd_dirty_tracking)
TEST_F(iommufd_mock_domain, page_size)
{
	size_t size = self->mmap_buf_size, largest;
	size_t left = size - 3 * PAGE_SIZE;
	uint8_t *buf;
	__u64 iova;

	buf = mmap(0, size, PROT_READ | PROT_WRITE, self->mmap_flags, -1, 0);
	ASSERT_NE(MAP_FAILED, buf);
	memset(buf, 1, size);
	test_ioctl_ioas_map(buf, size, &iova);
	if (_test_ioctl_page_size(self->fd, self->ioas_id, iova, size, size, 0) &&
	    errno == EOPNOTSUPP)
		SKIP(return, "The tables of the domains cannot do it");

	/* Each address leads where it led, whatever the sizes are. */
	for (largest = PAGE_SIZE; largest <= size; largest *= 4) {
		test_ioctl_page_size(iova, size, largest, 0);
		check_mock_iova(buf, iova, size);
		test_ioctl_page_size(iova + PAGE_SIZE, 3 * PAGE_SIZE, PAGE_SIZE, 0);
		check_mock_iova(buf, iova, size);
	}
	for (; largest >= PAGE_SIZE; largest /= 4) {
		test_ioctl_page_size(iova, size, largest, 0);
		check_mock_iova(buf, iova, size);
	}

	test_err_ioctl_page_size(EINVAL, iova, size, 3 * PAGE_SIZE, 0);
	test_err_ioctl_page_size(EINVAL, iova, size, PAGE_SIZE / 2, 0);
	test_err_ioctl_page_size(EINVAL, iova, 0, PAGE_SIZE, 0);
	test_err_ioctl_page_size(EINVAL, iova + 1, PAGE_SIZE, PAGE_SIZE, 0);
	test_err_ioctl_page_size(ENOENT, iova, size + PAGE_SIZE, PAGE_SIZE, 0);
	test_err_ioctl_page_size(EOPNOTSUPP, iova, size, PAGE_SIZE, 2);
	test_err_ioctl_page_size(EOVERFLOW, 0xfffffffffffff000ULL - PAGE_SIZE, 4 * PAGE_SIZE,
				 PAGE_SIZE, 0);

	test_err_ioctl_page_size(EINVAL, iova, size, 0, IOMMU_IOAS_PAGE_SIZE_CUT);
	/* Tables that map nothing are freed, here and where there is no area; others stay. */
	test_ioctl_page_size(0, 1ULL << 40, 0, 0);
	check_mock_iova(buf, iova, size);

	/* A part of an area, also of a large page, is unmapped alone. */
	test_ioctl_page_size(iova, size, size, 0);
	test_err_ioctl_ioas_unmap(ENOENT, iova + PAGE_SIZE, 2 * PAGE_SIZE);
	test_ioctl_page_size(iova + PAGE_SIZE, 2 * PAGE_SIZE, size, IOMMU_IOAS_PAGE_SIZE_CUT);
	check_mock_iova(buf, iova, size);
	test_ioctl_ioas_unmap(iova + PAGE_SIZE, 2 * PAGE_SIZE);
	check_mock_iova(buf, iova, PAGE_SIZE);
	check_mock_iova(buf + size - left, iova + size - left, left);
	test_err_ioctl_page_size(ENOENT, iova, size, PAGE_SIZE, 0);
	/* What was cut merges no more across it. */
	test_ioctl_page_size(iova + size - left, left, size, 0);
	check_mock_iova(buf + size - left, iova + size - left, left);
	test_ioctl_ioas_unmap(iova, PAGE_SIZE);
	test_ioctl_ioas_unmap(iova + size - left, left);
	ASSERT_EQ(0, munmap(buf, size));
}

//@ tools/testing/selftests/iommu/iommufd.c, before: TEST_F(iommufd_dirty_tracking, get_dirty_bitmap_no_clear)
/* Large pages are split while their writes are tracked, and merged again: no bit is lost. */
TEST_F(iommufd_dirty_tracking, page_size)
{
	unsigned long huge = MOCK_HUGE_PAGE_SIZE / MOCK_PAGE_SIZE;
	unsigned long *bits = self->bitmap, i;
	size_t size = variant->buffer_size;
	__u64 dirty = 0;
	uint32_t hwpt_id;

	if (!variant->hugepages)
		SKIP(return, "Pages are small from the beginning");
	test_ioctl_ioas_map_fixed_id(self->ioas_id, self->buffer, size, MOCK_APERTURE_START);
	test_cmd_hwpt_alloc_iommupt(self->idev_id, self->ioas_id,
				    IOMMU_HWPT_ALLOC_DIRTY_TRACKING, MOCK_IOMMUPT_HUGE, &hwpt_id);
	if (_test_ioctl_page_size(self->fd, self->ioas_id, MOCK_APERTURE_START, size,
				  MOCK_HUGE_PAGE_SIZE, 0) &&
	    errno == EOPNOTSUPP) {
		test_ioctl_destroy(hwpt_id);
		SKIP(return, "The tables of the domain cannot do it");
	}
	test_cmd_set_dirty_tracking(hwpt_id, true);

	/* Parts of a page that is written to are. */
	memset(bits, 0, self->bitmap_size / BITS_PER_BYTE);
	set_bit(huge + 1, bits);
	test_cmd_mock_domain_set_dirty(self->fd, hwpt_id, size, MOCK_APERTURE_START, MOCK_PAGE_SIZE,
				       self->bitmap, &dirty);
	test_ioctl_page_size(MOCK_APERTURE_START, size, PAGE_SIZE, 0);
	memset(bits, 0, self->bitmap_size / BITS_PER_BYTE);
	test_cmd_get_dirty_bitmap(self->fd, hwpt_id, size, MOCK_APERTURE_START, MOCK_PAGE_SIZE,
				  self->bitmap, 0);
	for (i = 0; i < self->bitmap_size; i++)
		ASSERT_EQ(i >= huge && i < 2 * huge, test_bit(i, bits));

	/* Each part by itself, from now on. */
	test_mock_dirty_bitmaps(hwpt_id, size, MOCK_APERTURE_START, self->page_size, MOCK_PAGE_SIZE,
				self->bitmap, self->bitmap_size, 0, _metadata);

	/* A page of which a part was written to is. */
	memset(bits, 0, self->bitmap_size / BITS_PER_BYTE);
	set_bit(2 * huge + 7, bits);
	test_cmd_mock_domain_set_dirty(self->fd, hwpt_id, size, MOCK_APERTURE_START, MOCK_PAGE_SIZE,
				       self->bitmap, &dirty);
	test_ioctl_page_size(MOCK_APERTURE_START, size, MOCK_HUGE_PAGE_SIZE, 0);
	memset(bits, 0, self->bitmap_size / BITS_PER_BYTE);
	test_cmd_get_dirty_bitmap(self->fd, hwpt_id, size, MOCK_APERTURE_START, MOCK_PAGE_SIZE,
				  self->bitmap, 0);
	for (i = 0; i < self->bitmap_size; i++)
		ASSERT_EQ(i >= 2 * huge && i < 3 * huge, test_bit(i, bits));

	test_ioctl_destroy(hwpt_id);
}

//@ tools/testing/selftests/iommu/iommufd_fail_nth.c, before: /* iopt_area_fill_domains() and iopt_area_fill_domain() */\nTEST_FAIL_NTH(basic_fail_nth, map_file_domain)
/* iopt_set_page_size() and iopt_area_split() */
TEST_FAIL_NTH(basic_fail_nth, page_size)
{
	uint32_t ioas_id;
	__u32 stdev_id;
	__u32 hwpt_id;
	__u64 iova;
	int rc;

	self->fd = open("/dev/iommu", O_RDWR);
	if (self->fd == -1)
		return -1;
	if (_test_ioctl_ioas_alloc(self->fd, &ioas_id))
		return -1;
	if (_test_cmd_mock_domain(self->fd, ioas_id, &stdev_id, &hwpt_id, NULL))
		return -1;
	if (_test_ioctl_ioas_map(self->fd, ioas_id, buffer, 262144, &iova,
				 IOMMU_IOAS_MAP_WRITEABLE | IOMMU_IOAS_MAP_READABLE))
		return -1;
	rc = _test_ioctl_page_size(self->fd, ioas_id, iova, 262144, 262144, 0);
	fail_nth_enable();
	if (rc && errno == EOPNOTSUPP)
		return 0;

	if (_test_ioctl_page_size(self->fd, ioas_id, iova, 262144, PAGE_SIZE, 0))
		return -1;
	if (_test_ioctl_page_size(self->fd, ioas_id, iova, 262144, 262144, 0))
		return -1;
	if (_test_ioctl_page_size(self->fd, ioas_id, iova + PAGE_SIZE, PAGE_SIZE, 262144,
				  IOMMU_IOAS_PAGE_SIZE_CUT))
		return -1;
	return 0;
}
//@ drivers/iommu/generic_pt/kunit_iommu_pt.h, before: static struct kunit_case iommu_test_cases[] = {
/* Pages of the window in which sizes change, and how often something is done there. */
#define SIZES_PAGES 4096
#define SIZES_STEPS 400

static void check_sizes(struct kunit *test, pt_vaddr_t base, pt_oaddr_t pa,
			const unsigned long *mapped)
{
	struct kunit_iommu_priv *priv = test->priv;
	unsigned int i;

	for (i = 0; i != SIZES_PAGES; i++) {
		u64 offset = (u64)i * priv->smallest_pgsz;
		phys_addr_t expected = test_bit(i, mapped) ? pa + offset : 0;

		KUNIT_ASSERT_EQ(test, iommu_iova_to_phys(&priv->domain, base + offset), expected);
	}
}

/* Beside maps and unmaps, also of parts of leaves, sizes change: each address translates as before. */
static void test_page_sizes(struct kunit *test)
{
	struct kunit_iommu_priv *priv = test->priv;
	struct iommu_domain *domain = &priv->domain;
	u64 page = priv->smallest_pgsz, window = SIZES_PAGES * page;
	pt_vaddr_t base = ALIGN(pt_top_range(priv->common).va + window, window);
	pt_oaddr_t pa = 2 * window;
	unsigned long *mapped;
	unsigned int step;

	if (!iommu_has_page_sizes(domain))
		kunit_skip(test, "Leaves of this format do not change their sizes");
	mapped = kunit_kcalloc(test, BITS_TO_LONGS(SIZES_PAGES), sizeof(*mapped), GFP_KERNEL);
	KUNIT_ASSERT_NOT_NULL(test, mapped);
	KUNIT_ASSERT_EQ(test, iommu_set_page_size(domain, base, window, page / 2, GFP_KERNEL),
			-EINVAL);

	for (step = 0; step != SIZES_STEPS; step++) {
		unsigned int first = get_random_u32_below(SIZES_PAGES);
		unsigned int end = first + 1 + get_random_u32_below(SIZES_PAGES - first);
		pt_vaddr_t at = base + first * page;
		u64 len = (end - first) * page;

		if (find_next_bit(mapped, end, first) >= end) {
			do_map(test, at, pa + first * page, len);
			bitmap_set(mapped, first, end - first);
		} else if (find_next_zero_bit(mapped, end, first) >= end &&
			   !get_random_u32_below(3)) {
			KUNIT_ASSERT_NO_ERRNO(test, iommu_cut(domain, at, GFP_KERNEL));
			KUNIT_ASSERT_NO_ERRNO(test, iommu_cut(domain, at + len, GFP_KERNEL));
			do_unmap(test, at, len);
			bitmap_clear(mapped, first, end - first);
		} else {
			u64 largest = page << get_random_u32_below(14);

			KUNIT_ASSERT_NO_ERRNO(test, iommu_set_page_size(domain, at, len, largest,
									GFP_KERNEL));
		}
		if (step % 16 == 0)
			check_sizes(test, base, pa, mapped);
		cond_resched();
	}
	check_sizes(test, base, pa, mapped);
	KUNIT_ASSERT_NO_ERRNO(test, iommu_set_page_size(domain, base, window, 0, GFP_KERNEL));
	check_sizes(test, base, pa, mapped);

	/* What is left is merged, and goes by leaves of any size. */
	KUNIT_ASSERT_NO_ERRNO(test, iommu_set_page_size(domain, base, window, window, GFP_KERNEL));
	check_sizes(test, base, pa, mapped);
	for (step = 0; step != SIZES_PAGES; step++) {
		unsigned int end = find_next_zero_bit(mapped, SIZES_PAGES, step);

		if (end == step)
			continue;
		do_unmap(test, base + step * page, (end - step) * page);
		step = end - 1;
	}
	KUNIT_ASSERT_EQ(test, count_valids(test), 0);
}

/* The fewest leaves lie on both sides of a cut, and give way to the leaf that was there. */
static void test_cut(struct kunit *test)
{
	struct kunit_iommu_priv *priv = test->priv;
	struct iommu_domain *domain = &priv->domain;
	u64 size = 1ULL << __fls(domain->pgsize_bitmap & GENMASK_U64(30, 0));
	pt_vaddr_t base = size;
	u64 cut = size / 2 + priv->smallest_pgsz;

	if (!iommu_has_page_sizes(domain))
		kunit_skip(test, "Leaves of this format do not change their sizes");
	if (size == priv->smallest_pgsz || base > pt_top_range(priv->common).last_va - size)
		kunit_skip(test, "No leaf can be cut");
	do_map(test, base, size, size);
	KUNIT_ASSERT_EQ(test, count_valids_single(test, size), 1);
	KUNIT_ASSERT_NO_ERRNO(test, iommu_cut(domain, base + cut, GFP_KERNEL));
	check_iova(test, base, size, min(size, SZ_4M));
	check_iova(test, base + cut - priv->smallest_pgsz, size + cut - priv->smallest_pgsz,
		   2 * priv->smallest_pgsz);
	KUNIT_ASSERT_NO_ERRNO(test, iommu_set_page_size(domain, base, size, size, GFP_KERNEL));
	KUNIT_ASSERT_EQ(test, count_valids_single(test, size), 1);
	KUNIT_ASSERT_NO_ERRNO(test, iommu_cut(domain, base + cut, GFP_KERNEL));
	do_unmap(test, base + cut, size - cut);
	check_iova(test, base, size, min(cut, SZ_4M));
	do_unmap(test, base, cut);
	KUNIT_ASSERT_EQ(test, count_valids(test), 0);
}

//@ drivers/iommu/generic_pt/kunit_iommu_pt.h, before: 	KUNIT_CASE_FMT(test_mixed),
	KUNIT_CASE_FMT(test_page_sizes),
	KUNIT_CASE_FMT(test_cut),
