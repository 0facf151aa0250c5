//! The semantics of mapping, by rows: what the two interfaces of the kernel answer, and what this
//! library does over each of its back ends.
//!
//! A row ([`rows`]) says what a container of VFIO's type 1 and an address space of iommufd
//! answer. It is shown on a plain model of both, call by call; the same calls can be made to a kernel.
//! Then the library does the same thing over each back end, with errors that must have the same
//! number ([`ioas::MapError::errno`] and its like). Where the library differs on purpose, the row says
//! so.
//!
//! Not rows, since nobody can say them with this library: unknown flags and short structures; the
//! first version of the container.

mod row;
mod rows;
mod subjects;

use crate::plain_kernel::{Plain, PlainIommufd, PlainType1};
use ioas::Profile;
use row::Row;
use rows::rows;
use subjects::{Models, OwnTables, Raw, Subject};

/// The column of a profile.
const fn column(profile: Profile) -> usize {
    match profile {
        Profile::Type1 => 0,
        Profile::Iommufd => 1,
    }
}

fn kernel<const IOMMUFD: bool>(profile: Profile) {
    let mut shown = 0;
    for row in rows::<Plain<IOMMUFD>, OwnTables>() {
        let (Some(calls), Some(expected)) = (row.kernel, row.expected[column(profile)]) else {
            continue;
        };
        let answer = calls(&mut Raw::new(profile));
        assert_eq!(answer, expected, "{profile:?}: {}", row.name);
        shown += 1;
    }
    assert!(shown > 20, "{shown}");
}

fn library<S: Subject>(profile: Profile, own: bool, new: impl Fn() -> S) {
    let mut shown = 0;
    for row in rows::<PlainType1, S>() {
        let Row {
            name,
            expected,
            library,
            ..
        } = row;
        let own = row.own.filter(|_| own);
        let expected = own.or(row.everywhere).or(expected[column(profile)]);
        let (Some(calls), Some(expected)) = (library, expected) else {
            continue;
        };
        let answer = calls(&mut new(), profile);
        assert_eq!(answer, expected, "{profile:?}: {name}");
        shown += 1;
    }
    assert!(shown > 20, "{shown}");
}

#[test]
fn a_container_answers_as_the_table_says() {
    kernel::<false>(Profile::Type1);
}

#[test]
fn iommufd_answers_as_the_table_says() {
    kernel::<true>(Profile::Iommufd);
}

#[test]
fn own_tables_behave_as_a_container() {
    library(Profile::Type1, true, OwnTables::new);
}

#[test]
fn own_tables_behave_as_iommufd() {
    library(Profile::Iommufd, true, OwnTables::new);
}

#[test]
fn the_back_end_over_a_container_behaves_as_one() {
    library(Profile::Type1, false, Models::<PlainType1>::new);
}

#[test]
fn the_back_end_over_iommufd_behaves_as_iommufd() {
    library(Profile::Iommufd, false, Models::<PlainIommufd>::new);
}
