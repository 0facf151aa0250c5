//! Numbers of the virtqueues (VIRTIO 1.3, 5.5.2), as the standard has them and as they are used.
//!
//! The standard gives each queue a fixed number. Linux's drivers and the monitors number the queues
//! that were negotiated, one after the other, so that with reporting and without statistics reporting_vq
//! has number 2. Both ends of a device must agree; nothing in the device tells the numbering.

use crate::features::Features;

/// A virtqueue of the balloon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Queue {
    /// inflateq: pages into the balloon.
    Inflate,
    /// deflateq: pages out of it.
    Deflate,
    /// statsq: statistics of the guest.
    Stats,
    /// free_page_vq: hints about pages that are free.
    FreePage,
    /// reporting_vq: reports of pages that are free.
    Reporting,
}

/// How queues are numbered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Numbering {
    /// Each has the number of the standard, whichever others there are.
    Specification,
    /// The n-th of those that there are has number n.
    Compressed,
}

impl Queue {
    /// All, in the order of their numbers.
    pub const ALL: [Self; 5] = [
        Self::Inflate,
        Self::Deflate,
        Self::Stats,
        Self::FreePage,
        Self::Reporting,
    ];

    /// Features without which the queue does not exist.
    pub const fn needs(self) -> Features {
        match self {
            Self::Inflate | Self::Deflate => Features(0),
            Self::Stats => Features::STATS_VQ,
            Self::FreePage => Features::FREE_PAGE_HINT,
            Self::Reporting => Features::PAGE_REPORTING,
        }
    }

    /// The number of this queue where these features were negotiated; `None` where it does not exist.
    pub fn number(self, features: Features, numbering: Numbering) -> Option<u16> {
        Self::numbered(features, numbering)
            .find(|(queue, _)| *queue == self)
            .map(|(_, number)| number)
    }

    /// The queue of this number where these features were negotiated.
    pub fn of_number(number: u16, features: Features, numbering: Numbering) -> Option<Self> {
        Self::numbered(features, numbering)
            .find(|(_, found)| *found == number)
            .map(|(queue, _)| queue)
    }

    /// All queues that exist, with their numbers.
    pub fn numbered(features: Features, numbering: Numbering) -> impl Iterator<Item = (Self, u16)> {
        let there = Self::ALL
            .into_iter()
            .zip(0u16..)
            .filter(move |(queue, _)| features.contains(queue.needs()));
        there
            .zip(0u16..)
            .map(move |((queue, fixed), nth)| match numbering {
                Numbering::Specification => (queue, fixed),
                Numbering::Compressed => (queue, nth),
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reporting_without_stats_is_queue_2_where_numbers_are_compressed() {
        let features = Features::PAGE_REPORTING.with(Features::MUST_TELL_HOST);
        assert_eq!(
            Queue::Reporting.number(features, Numbering::Compressed),
            Some(2)
        );
        assert_eq!(
            Queue::Reporting.number(features, Numbering::Specification),
            Some(4)
        );
        assert_eq!(
            Queue::Stats.number(features, Numbering::Specification),
            None
        );
    }

    #[test]
    fn numbers_lead_back_to_their_queues() {
        for bits in 0..64 {
            let features = Features(bits);
            for numbering in [Numbering::Specification, Numbering::Compressed] {
                let mut found = 0;
                for number in 0..8 {
                    if let Some(queue) = Queue::of_number(number, features, numbering) {
                        assert_eq!(queue.number(features, numbering), Some(number));
                        found += 1;
                    }
                }
                let there = Queue::ALL
                    .into_iter()
                    .filter(|queue| features.contains(queue.needs()));
                assert_eq!(found, there.count());
            }
        }
    }

    #[test]
    fn with_all_features_both_numberings_agree() {
        for (nr, queue) in (0..).zip(Queue::ALL) {
            assert_eq!(
                queue.number(Features(0x3f), Numbering::Compressed),
                Some(nr)
            );
            assert_eq!(
                queue.number(Features(0x3f), Numbering::Specification),
                Some(nr)
            );
        }
    }
}
