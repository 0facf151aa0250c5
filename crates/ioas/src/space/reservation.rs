//! Charges of released areas, kept while a device or a domain comes and goes (`memory/reservation.rs`).

use alloc::boxed::Box;
use alloc::vec::Vec;

use runs::{Iova, Span};

use crate::areas::Areas;
use crate::areas::area::HeldArea;
use crate::memory::Reserved;
use crate::space::error::MapError;

/// Charges of released areas, each by where it begins. Dropped, they are given back.
#[derive(Default)]
#[must_use = "it is charged to be kept"]
pub(crate) struct ForReleased(Vec<(u64, Box<Reserved>)>);

impl Areas {
    /// Charges what released areas keep of a device or domain that is to make their address space live,
    /// or charges them so many `times` more; all or nothing. [`keep`](Self::keep) is what comes next.
    ///
    /// # Errors
    ///
    /// The area, and [`MapError::OverLimit`].
    pub(crate) fn charge_released(
        &self,
        times: Option<u64>,
    ) -> Result<ForReleased, (Span<Iova>, MapError)> {
        let charged = |area: &HeldArea| {
            let reserved = area.memory.reserve(area.part(), times);
            let refused = |over| (area.range, MapError::OverLimit(over));
            Ok((area.range.start, reserved.map_err(refused)?))
        };
        let released = self.iter().filter(|area| area.keeps_charge());
        released
            .map(charged)
            .collect::<Result<_, _>>()
            .map(ForReleased)
    }

    /// Keeps what was charged for the areas as they still are.
    pub(crate) fn keep(&mut self, charged: ForReleased) {
        for (start, more) in charged.0 {
            if let Some((_, area)) = self.0.at_mut(start) {
                match &mut area.reserved {
                    Some(reserved) => reserved.add(*more),
                    none => *none = Some(more),
                }
            }
        }
    }

    /// A device has left: of what one area alone keeps, gives back all but so many `times`; everything
    /// if that is [`None`], since no device is live.
    #[cfg(any(feature = "vfio", feature = "iommufd"))]
    pub(crate) fn keep_only(&mut self, times: Option<u64>) {
        let Ok(()) = self.0.try_for_each_mut(0, u64::MAX, |_, area| {
            match (times, &mut area.reserved) {
                (Some(times), Some(reserved)) => reserved.shrink_to(times),
                (_, reserved) => *reserved = None,
            }
            Ok::<_, core::convert::Infallible>(())
        });
    }
}
