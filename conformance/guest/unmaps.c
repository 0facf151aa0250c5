// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * A driver that unmaps what is not mapped: a KUnit suite for the kernels of Linux's own tests, built into them beside the
 * formats. What it expects is what Linux's own tables do.
 */
#include <kunit/test.h>
#include <linux/iommu.h>
#include <linux/pci.h>
#include <linux/sizes.h>

#define IOVA SZ_1G
#define PA SZ_16M
#define PROT (IOMMU_READ | IOMMU_WRITE)

static int open(struct kunit *test)
{
	struct iommu_domain *domain;
	struct pci_dev *device = NULL;

	for_each_pci_dev(device)
		if (device_iommu_mapped(&device->dev))
			break;
	if (!device)
		return -ENODEV;
	domain = iommu_paging_domain_alloc(&device->dev);
	pci_dev_put(device);
	if (IS_ERR(domain))
		return PTR_ERR(domain);
	test->priv = domain;
	return 0;
}

static void close(struct kunit *test)
{
	if (test->priv)
		iommu_domain_free(test->priv);
}

static void map(struct kunit *test, size_t offset, size_t size)
{
	KUNIT_ASSERT_EQ(test, 0, iommu_map(test->priv, IOVA + offset, PA + offset, size, PROT, GFP_KERNEL));
}

static size_t unmap(struct kunit *test, size_t offset, size_t size)
{
	return iommu_unmap(test->priv, IOVA + offset, size);
}

static bool there(struct kunit *test, size_t offset)
{
	return iommu_iova_to_phys(test->priv, IOVA + offset) == PA + offset;
}

static void nothing(struct kunit *test)
{
	KUNIT_EXPECT_EQ(test, 0, unmap(test, 0, SZ_4K));
	KUNIT_EXPECT_EQ(test, 0, unmap(test, 0, SZ_4M));
}

static void twice(struct kunit *test)
{
	map(test, 0, SZ_8K);
	KUNIT_EXPECT_EQ(test, SZ_8K, unmap(test, 0, SZ_8K));
	KUNIT_EXPECT_EQ(test, 0, unmap(test, 0, SZ_8K));
	map(test, 0, SZ_8K);
	KUNIT_EXPECT_TRUE(test, there(test, SZ_4K));
}

static void beyond_the_end(struct kunit *test)
{
	map(test, 0, 3 * SZ_4K);
	KUNIT_EXPECT_EQ(test, 3 * SZ_4K, unmap(test, 0, SZ_64K));
	KUNIT_EXPECT_FALSE(test, there(test, 0));
	KUNIT_EXPECT_FALSE(test, there(test, SZ_8K));
}

static void before_the_begin(struct kunit *test)
{
	map(test, SZ_4K, SZ_4K);
	KUNIT_EXPECT_EQ(test, 0, unmap(test, 0, SZ_8K));
	KUNIT_EXPECT_TRUE(test, there(test, SZ_4K));
}

static void over_a_hole(struct kunit *test)
{
	map(test, 0, SZ_4K);
	map(test, SZ_8K, SZ_4K);
	KUNIT_EXPECT_EQ(test, SZ_4K, unmap(test, 0, 3 * SZ_4K));
	KUNIT_EXPECT_FALSE(test, there(test, 0));
	KUNIT_EXPECT_TRUE(test, there(test, SZ_8K));
}

static void a_part_of_a_leaf(struct kunit *test)
{
	map(test, 0, SZ_2M);
	/* Not from its middle on, but from its begin on, and then all of it. */
	KUNIT_EXPECT_EQ(test, 0, unmap(test, SZ_1M, SZ_4K));
	KUNIT_EXPECT_TRUE(test, there(test, SZ_1M));
	KUNIT_EXPECT_EQ(test, SZ_2M, unmap(test, 0, SZ_4K));
	KUNIT_EXPECT_FALSE(test, there(test, SZ_1M));
}

static struct kunit_case cases[] = {
	KUNIT_CASE(nothing),	      KUNIT_CASE(twice),       KUNIT_CASE(beyond_the_end),
	KUNIT_CASE(before_the_begin), KUNIT_CASE(over_a_hole), KUNIT_CASE(a_part_of_a_leaf),
	{},
};

static struct kunit_suite suite = {
	.name = "unmaps",
	.init = open,
	.exit = close,
	.test_cases = cases,
};
kunit_test_suite(suite);
