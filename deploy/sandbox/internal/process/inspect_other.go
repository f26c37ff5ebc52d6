//go:build !linux

package process

import (
	"errors"
	"net/netip"
)

// Listeners is only supported on Linux.
func Listeners(int) ([]netip.AddrPort, error) { return nil, errors.ErrUnsupported }

// WithEnvironment is only supported on Linux.
func WithEnvironment(string) ([]int, error) { return nil, errors.ErrUnsupported }
