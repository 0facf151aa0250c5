//! IOMMU units: the seam, and a software unit.
