// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Gaps of Linux 7.2 behind the RISC-V IOMMU: its DMA API, which Kconfig has for other processors only, and that its
 * tables see what caches hold, without which VFIO takes no device. Messages of interrupts are not mapped: interrupts
 * go by wire.
 */
//@ drivers/iommu/riscv/Kconfig, before: 	select IOMMU_API
	select IOMMU_DMA
//@ drivers/iommu/riscv/iommu.c, before: static const struct iommu_ops riscv_iommu_ops = {
static bool riscv_iommu_capable(struct device *dev, enum iommu_cap cap)
{
	return cap == IOMMU_CAP_CACHE_COHERENCY;
}

//@ drivers/iommu/riscv/iommu.c, before: 	.of_xlate = riscv_iommu_of_xlate,
	.capable = riscv_iommu_capable,
