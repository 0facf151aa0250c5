// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * A domain for each node of the devices, in containers of VFIO's type 1 and address spaces of iommufd: a device shares a
 * domain only if its tables lie on the device's node. `iommu.node_domains=1`; off by default.
 */
//@ drivers/iommu/iommu.c, at its end

static bool node_domains;
module_param(node_domains, bool, 0644);
MODULE_PARM_DESC(node_domains, "VFIO and iommufd: devices of different nodes have page tables of their own");

bool iommu_domain_is_near(struct iommu_domain *domain, int node);
int iommu_domain_node(struct iommu_domain *domain);

/**
 * iommu_domain_node() - where the tables of a domain are allocated
 * @domain: the domain
 *
 * Return: the node, or NUMA_NO_NODE where the driver has tables of its own.
 */
int iommu_domain_node(struct iommu_domain *domain)
{
	struct pt_iommu *tables = iommupt_from_domain(domain);

	return tables ? tables->nid : NUMA_NO_NODE;
}
EXPORT_SYMBOL_GPL(iommu_domain_node);

/**
 * iommu_domain_is_near() - whether devices of a node may share a domain
 * @domain: the domain
 * @node: that of a device
 *
 * Return: false when its tables are known to be on another node, and that matters.
 */
bool iommu_domain_is_near(struct iommu_domain *domain, int node)
{
	int own = iommu_domain_node(domain);

	return !node_domains || own == node || own == NUMA_NO_NODE || node == NUMA_NO_NODE;
}
EXPORT_SYMBOL_GPL(iommu_domain_is_near);
//@ drivers/vfio/vfio_iommu_type1.c, before: static int vfio_iommu_domain_alloc(
bool iommu_domain_is_near(struct iommu_domain *domain, int node);
int iommu_domain_node(struct iommu_domain *domain);

//@ drivers/vfio/vfio_iommu_type1.c, before: d->enforce_cache_coherency ==
iommu_domain_is_near(d->domain, iommu_domain_node(domain->domain)) &&
//@ drivers/iommu/iommufd/device.c, before: typedef struct iommufd_hw_pagetable *(*attach_fn)(
bool iommu_domain_is_near(struct iommu_domain *domain, int node);

//@ drivers/iommu/iommufd/device.c, before: 		if (!hwpt_paging->auto_domain)
		/* The devices of a group stay together, whatever their nodes. */
		if (hwpt_paging->common.domain != iommu_get_domain_for_dev(idev->dev) &&
		    !iommu_domain_is_near(hwpt_paging->common.domain, dev_to_node(idev->dev)))
			continue;
