//go:build !linux

package main

import "fmt"

func command([]string) int {
	fmt.Println("netchaos: FAIL it takes Linux: network namespaces, nftables and a tun device")
	return 1
}
