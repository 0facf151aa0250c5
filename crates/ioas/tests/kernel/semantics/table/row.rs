//! Rows of the table.

use ioas::{Mapper, Profile};

use super::subject::{Answer, Raw, Subject};

/// An interface of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Column {
    /// A container of VFIO's type 1.
    Type1,
    /// A container that iommufd plays.
    Compatibility,
    /// An address space of iommufd.
    Iommufd,
}

impl Column {
    /// Interface whose error numbers the library has over it.
    pub(crate) const fn profile(self) -> Profile {
        match self {
            Self::Type1 | Self::Compatibility => Profile::Type1,
            Self::Iommufd => Profile::Iommufd,
        }
    }
}

/// One line of the table.
pub(crate) struct Row<K: Mapper, S> {
    pub(crate) name: &'static str,
    /// Answer of each interface; `None` where it has no such operation.
    expected: [Option<Answer>; 3],
    /// The kernel's calls.
    pub(crate) kernel: Option<fn(&mut Raw<K>) -> Answer>,
    /// The same operation by the library.
    pub(crate) library: Option<fn(&mut S, Profile) -> Answer>,
    /// Answer of the library over every back end, where that is not the kernel's answer.
    pub(crate) everywhere: Option<Answer>,
    /// Answer of the library over tables of ours, where that is different again.
    pub(crate) own: Option<Answer>,
}

impl<K: Mapper, S: Subject> Row<K, S> {
    /// The compatibility layer answers as the type that it plays, if nothing else is said.
    pub(crate) fn new(name: &'static str, type1: Answer, iommufd: Answer) -> Self {
        Self {
            name,
            expected: [Some(type1), Some(type1), Some(iommufd)],
            kernel: None,
            library: None,
            everywhere: None,
            own: None,
        }
    }

    /// Row of the library alone: no interface has an operation like this.
    pub(crate) fn ours(name: &'static str, answer: Answer) -> Self {
        let mut row = Self::new(name, answer, answer).everywhere(answer);
        row.expected.fill(None);
        row
    }

    /// Row of the one interface only.
    pub(crate) fn only(name: &'static str, profile: Profile, answer: Answer) -> Self {
        let mut row = Self::new(name, answer, answer);
        match profile {
            Profile::Type1 => row.expected[2] = None,
            Profile::Iommufd => row.expected[..2].fill(None),
        }
        row
    }

    pub(crate) fn compatibility(mut self, answer: Answer) -> Self {
        self.expected[1] = Some(answer);
        self
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

    /// Answer of the kernel.
    pub(crate) const fn answer(&self, column: Column) -> Option<Answer> {
        self.expected[column as usize]
    }

    /// Answer of the library, over the kernel or tables of ours. Over a container that iommufd plays it is the same as
    /// over one of type 1.
    pub(crate) fn library_answer(&self, column: Column, own: bool) -> Option<Answer> {
        let own = self.own.filter(|_| own);
        let kernels = match (self.answer(column), self.answer(Column::Type1)) {
            (Some(Err(_)), type1 @ Some(Err(_))) if column == Column::Compatibility => type1,
            (answer, _) => answer,
        };
        own.or(self.everywhere).or(kernels)
    }
}
