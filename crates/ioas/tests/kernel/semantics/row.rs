//! What a row of the table is.

use ioas::{Mapper, Profile};

use super::subjects::{Answer, Raw, Subject};

/// One line of the table.
pub(crate) struct Row<K: Mapper, S> {
    pub(crate) name: &'static str,
    /// What a container and what iommufd answers; `None` where one has no such operation.
    pub(crate) expected: [Option<Answer>; 2],
    /// The kernel's calls.
    pub(crate) kernel: Option<fn(&mut Raw<K>) -> Answer>,
    /// What the library does.
    pub(crate) library: Option<fn(&mut S, Profile) -> Answer>,
    /// What the library answers over every back end, where that is not the kernel's answer.
    pub(crate) everywhere: Option<Answer>,
    /// What it answers over tables of ours, where that is different again.
    pub(crate) own: Option<Answer>,
}

impl<K: Mapper, S: Subject> Row<K, S> {
    pub(crate) fn new(name: &'static str, type1: Answer, iommufd: Answer) -> Self {
        Self {
            name,
            expected: [Some(type1), Some(iommufd)],
            kernel: None,
            library: None,
            everywhere: None,
            own: None,
        }
    }

    /// Of one interface only.
    pub(crate) fn only(name: &'static str, profile: Profile, answer: Answer) -> Self {
        let mut row = Self::new(name, answer, answer);
        row.expected[1 - super::column(profile)] = None;
        row
    }

    pub(crate) fn kernel(mut self, calls: fn(&mut Raw<K>) -> Answer) -> Self {
        self.kernel = Some(calls);
        self
    }

    pub(crate) fn library(mut self, calls: fn(&mut S, Profile) -> Answer) -> Self {
        self.library = Some(calls);
        self
    }

    pub(crate) fn everywhere(mut self, answer: Answer) -> Self {
        self.everywhere = Some(answer);
        self
    }

    pub(crate) fn own(mut self, answer: Answer) -> Self {
        self.own = Some(answer);
        self
    }
}
