// Package netchaos runs the product on real control planes with a bad network between shim and
// agents, and measures the effect. Pods, and with them Nodes, come and go all the time; everything
// else is on loopback and healthy. See package badlink for the network.
package netchaos
