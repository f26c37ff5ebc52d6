//go:build !race

package main

// raced is whether the race detector watches the tests.
const raced = false
