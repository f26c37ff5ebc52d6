package main

import (
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"
	"k8s.io/client-go/util/cert"
	"k8s.io/utils/clock"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/authz"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/options"
)

func newPolicy() *cobra.Command {
	var trustDomain, certificate string
	check := &cobra.Command{
		Use:   "check [flags] FILE",
		Short: "Check a policy file as the agent does",
		Long:  `Check a policy file as the agent does, and name every mistake. An agent whose new policy has a mistake keeps using its last valid one.`,
		Args:  exactly(1, "policy check FILE"),
		RunE: func(command *cobra.Command, args []string) error {
			return checkPolicy(args[0], trustDomain, certificate, command.OutOrStdout())
		},
	}
	flags := check.Flags()
	flags.SortFlags = false
	flags.StringVar(&trustDomain, "trust-domain", options.New().TrustDomain, "Trust domain of the agent: its own --trust-domain.")
	flags.StringVar(&certificate, "certificate", "",
		"PEM `file` with a client certificate, followed by those of its issuers, including the root if the policy names it. "+
			"The rights of the certificate are printed. Signatures are not verified.")
	command := &cobra.Command{Use: "policy", Short: "Check policies", Args: exactly(0, "policy check FILE")}
	command.RunE = func(*cobra.Command, []string) error { return errors.New("write `capi-agent policy check FILE`") }
	command.AddCommand(check)
	return command
}

// exactly accepts n arguments, and otherwise returns the usage of the command.
func exactly(n int, usage string) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error {
		if len(args) != n {
			return fmt.Errorf("write `capi-agent %s`", usage)
		}
		return nil
	}
}

// checkPolicy checks a policy file, and reports its content, and the rights of a certificate unless
// that is empty, on out.
func checkPolicy(file, trustDomain, certificate string, out io.Writer) error {
	content, err := os.ReadFile(file) //nolint:gosec // the user names it
	if err != nil {
		return fmt.Errorf("reading the policy file: %w", err)
	}
	parsed, err := authz.ParsePolicy(content, trustDomain)
	if err != nil {
		return err
	}
	fmt.Fprintln(out, "valid:", parsed)
	if certificate == "" {
		return nil
	}
	chain, err := cert.CertsFromFile(certificate)
	if err != nil {
		return fmt.Errorf("--certificate: %w", err)
	}
	authorizer, err := authz.New(trustDomain, func() *authz.Policy { return parsed }, clock.RealClock{})
	if err != nil {
		return fmt.Errorf("--trust-domain: %w", err)
	}
	caller, err := authorizer.FromChains([][]*x509.Certificate{chain})
	if err != nil {
		return fmt.Errorf("--certificate: refused: %w", err)
	}
	fmt.Fprintln(out, "identity:", caller.Identity)
	if of := caller.Onboarding; of != nil && of.ID != "" {
		fmt.Fprintf(out, "onboarding: %s, which must be the Cluster's current one\n", of.ID)
	}
	for _, grant := range caller.Grants {
		fmt.Fprintln(out, "role:", grant)
	}
	if len(caller.Grants) == 0 {
		fmt.Fprintln(out, "roles: none; it may call GetStatus")
	}
	return nil
}
