//! Faults, as the driver receives them.

use iommu::FaultReason;
use iopt::walk::Access;

use crate::wire::FAULT_BYTES;

/// An access of an endpoint that was blocked: `struct virtio_iommu_fault` (VIRTIO 1.3, 5.13.6.9).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FaultReport {
    /// Cause.
    pub reason: ReportReason,
    /// Endpoint whose access it was.
    pub endpoint: u32,
    /// Kind of access, if known.
    pub access: Option<Access>,
    /// The address that could not be reached, if it is known.
    pub address: Option<u64>,
}

/// Reason of a blocked access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ReportReason {
    /// `VIRTIO_IOMMU_FAULT_R_UNKNOWN`: none of the others.
    Unknown = 0,
    /// `VIRTIO_IOMMU_FAULT_R_DOMAIN`: the endpoint is not attached to a domain.
    Domain = 1,
    /// `VIRTIO_IOMMU_FAULT_R_MAPPING`: the address is not mapped, or not for such an access.
    Mapping = 2,
}

/// `VIRTIO_IOMMU_FAULT_F_READ`.
const READ: u32 = 1 << 0;
/// `VIRTIO_IOMMU_FAULT_F_WRITE`.
const WRITE: u32 = 1 << 1;
/// `VIRTIO_IOMMU_FAULT_F_ADDRESS`.
const ADDRESS: u32 = 1 << 8;

impl FaultReport {
    /// Report of a unit's fault of `endpoint`. A reason that is none of the driver's becomes the closest of them.
    pub const fn of(endpoint: u32, fault: &iommu::Fault) -> Self {
        let reason = match (&fault.reason, fault.domain) {
            (FaultReason::NotAttached, _) | (FaultReason::Reported { .. }, None) => {
                ReportReason::Domain
            }
            (
                FaultReason::Walk(_)
                | FaultReason::WrapsAround { .. }
                | FaultReason::Reported { .. },
                _,
            ) => ReportReason::Mapping,
            _ => ReportReason::Unknown,
        };
        Self {
            reason,
            endpoint,
            access: fault.access,
            address: Some(fault.iova),
        }
    }

    /// As the driver reads it.
    pub fn to_bytes(&self) -> [u8; FAULT_BYTES] {
        let access = match self.access {
            Some(Access::Read) => READ,
            Some(Access::Write) => WRITE,
            _ => 0,
        };
        let flags = access | self.address.map_or(0, |_| ADDRESS);
        let words = [
            u64::from(self.reason as u8) | u64::from(flags) << 32,
            self.endpoint.into(),
            self.address.unwrap_or(0),
        ];
        let mut bytes = [0; FAULT_BYTES];
        for (place, word) in bytes.chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }
}
