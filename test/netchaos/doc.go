// Package netchaos runs the product on real control planes while the network between shim and agents is bad, and measures what that costs. Pods, and
// with them Nodes, come and go all the time; everything else is on loopback and healthy. See package badlink for the network.
package netchaos
