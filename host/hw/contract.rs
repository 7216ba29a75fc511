//! The rules that every implementation of the traits must keep, as functions that its tests call.
